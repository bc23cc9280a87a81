"""What the code that loads samples writes to, as far as its text tells.

Readings around a load tell which attributes of a dataset it changes, in the steps that are read
(body_changes.py). Of later steps the code of the dataset's class tells it. None of it runs.
"""

from collections.abc import Iterator
from functools import cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import Dataset

from elastic.data.attributes import has_space, space_of
from elastic.data.stale_copies import is_of_own_class
from elastic.train.accesses import ATTRIBUTES, Access, Action, Place, accesses
from elastic.train.control_flow import instructions

_DEPTH = 4
_FEW = 64  # parts in a list
_WRITING = frozenset(
    {"append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault", "add", "remove"}
    | {"discard", "sort", "reverse", "fill", "put", "fill_", "copy_", "zero_", "index_fill_", "index_copy_"}
)
_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_ATTR", "STORE_SLICE"})
_OUTER = Place.GLOBAL, Place.SHARED
_LOADING = "__getitem__", "__getitems__"


def written_by_loading(dataset: Any, name: str) -> bool:
    """Whether code that loads a sample writes to this attribute, or into it.

    name: such as `dataset.cache`, of the dataset or of a thing in it.
    """
    attribute = name.rpartition(".")[2].partition("[")[0]
    return any(attribute in _written(kind) for kind in _kinds(dataset, 0))


def _kinds(thing: Any, depth: int) -> Iterator[type]:
    """Classes of the dataset, of datasets in it, and of their transforms."""
    yield type(thing)
    for name, value in space_of(thing).items() if depth < _DEPTH else ():
        for each in value if isinstance(value, list | tuple) and len(value) <= _FEW else [value]:
            is_called = isinstance(each, Dataset) or ("transform" in name and has_space(each))
            if is_called or is_of_own_class(each):
                yield from _kinds(each, depth + 1)


@cache
def _written(kind: type) -> frozenset[str]:
    """Attributes that its methods which load a sample, or are called by those, write to."""
    return frozenset[str]().union(*(_targets(each.__code__) for each in loading_methods(kind)))


@cache
def loading_methods(kind: type, first: str = "") -> tuple[FunctionType, ...]:
    """Its methods that load a sample, and those that they call. first: where they begin, if not in
    `__getitem__` or a call.
    """
    methods: dict[str, list[FunctionType]] = {}
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in ("torch", "builtins", "typing"):
            for name, made in vars(each).items():
                function = made.fget if isinstance(made, property) else getattr(made, "__wrapped__", made)
                if isinstance(function, FunctionType):
                    methods.setdefault(name, []).append(function)
    known = [name for name in (*_LOADING, "__call__", "forward") if name in methods]
    # Of another object the dataset may call any.
    waiting = [first] if first else known or [each for each in methods if each != "__init__"]
    seen = dict[str, None]()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen[name] = None
            waiting += [
                each for made in methods.get(name, ()) for each in made.__code__.co_names if each in methods
            ]
    return tuple(each for name in seen for each in methods.get(name, ()))


@cache
def written_variables(code: CodeType) -> frozenset[str]:
    """`a` of `a[i] = x`, `a.b = x`, `a.append(x)`, and of `a = x` where it is no local one."""
    found = set[str]()
    for parts in _writes(code):
        found |= {each.name for each in parts if each.place in _OUTER and each.action is Action.READ}
    for each in chain.from_iterable(accesses(code)):
        if each.place in _OUTER and each.action is Action.WRITE:
            found.add(each.name)
    inner = (written_variables(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(found).union(*inner)


def _writes(code: CodeType) -> Iterator[list[Access]]:
    """The accesses that begin where a target, or a call that may write, begins."""
    named = accesses(code)
    by_start: dict[tuple[int | None, int | None], list[int]] = {}
    for number, each in enumerate(instructions(code)):
        if each.positions is not None:
            by_start.setdefault((each.positions.lineno, each.positions.col_offset), []).append(number)
    for numbers in by_start.values():
        parts = [each for number in numbers for each in named[number]]
        names = {each.name for each in parts if each.place in ATTRIBUTES and each.action is Action.READ}
        if _STORES & {instructions(code)[number].opname for number in numbers} or _WRITING & names:
            yield parts


def _targets(code: CodeType) -> set[str]:
    """`a` of `self.a[i] = x`, `self.a.b = x`, `self.a += x` and `self.a.append(x)`."""
    found = set[str]()
    for parts in _writes(code):
        found |= {each.name for each in parts if each.place in ATTRIBUTES}
    return found.union(*(_targets(each) for each in code.co_consts if isinstance(each, CodeType)))
