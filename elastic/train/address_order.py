"""A set of tensors, modules or other objects without a hash of their own has no order to rely on.

It iterates by the addresses of its elements, which are others in each process. A set is refused
where code of the recipe iterates it: one that is only asked for its elements is fine.
"""

import dis
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import Tensor, nn

_BY_ADDRESS: tuple[Any, ...] = object.__hash__, Tensor.__hash__
_LOADS = "LOAD_NAME", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_ATTR"
_ITERATING = frozenset(
    {
        *("list", "tuple", "enumerate", "zip", "map", "sum", "iter", "next", "chain"),
        *("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "stack", "cat"),
    }
)
MANY_ITEMS = 1000


def kind_of(thing: Any) -> str | None:
    """What a set has several of that lie in it by their addresses; None for another set."""
    if len(thing) < 2 or len(thing) > MANY_ITEMS:
        return None
    found = [each for each in thing if each is not None and type(each).__hash__ in _BY_ADDRESS]
    if len(found) < 2:
        return None
    kinds = {_word(each) for each in found}
    return kinds.pop() if len(kinds) == 1 else "objects"


@cache
def iterated(code: CodeType) -> frozenset[str]:
    """The variables and attributes that a function, or one inside it, iterates."""
    instructions = list(dis.get_instructions(code))
    found = {
        before.argval
        for before, each in pairwise(instructions)
        if each.opname == "GET_ITER" and before.opname in _LOADS
    }
    by_line: dict[int | None, set[str]] = {}
    for each in instructions:
        if each.opname in _LOADS or each.opname == "LOAD_METHOD":
            by_line.setdefault(each.positions.lineno if each.positions else None, set()).add(each.argval)
    found = found.union(*(names for names in by_line.values() if names & _ITERATING))
    return frozenset(found).union(*(iterated(each) for each in code.co_consts if isinstance(each, CodeType)))


def refusal(sets: dict[str, str], names: Collection[str]) -> str:
    """sets: of what each is one, by path. names: that are iterated. Empty where none is."""
    for path, kind in sets.items():
        if path.rpartition(".")[2] in names:
            return (
                f"{path} is a set of {kind}, and the recipe iterates it: they come in the order of their addresses in memory, which are others in each "
                f"process, so that the run would end with another result. Write a list, or dict.fromkeys(...), which has each once in the order of its arguments"
            )
    return ""


def _word(thing: Any) -> str:
    match thing:
        case nn.Parameter():
            return "parameters"
        case Tensor():
            return "tensors"
        case nn.Module():
            return "modules"
        case type():
            return "classes"
        case _:
            return f"{type(thing).__name__} objects"
