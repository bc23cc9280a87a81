"""What the objects of a state consist of is looked up whenever it is needed, and never trusted.

Recipes freeze layers, swap modules, add parameter groups and assign buffers while the loop runs.
The answer depends on the objects as they are now alone, so that it is the same in a process that
resumes. It is asked several times in every step. So a walk through the modules is not done again
where each of them still has the same children (Tree): for 150 modules that takes a fifth of a walk.

It follows the attributes of an object that is no module (a trainer of the recipe's own, which
holds model and optimizer) two levels deep, and no container of more than 100 items, but for the
parameters in a container that begins with a tensor: an optimizer of the recipe's own has such a
list, and in a memory of many thousand tensors only their types are looked at.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

T = TypeVar("T")

DEPTH = 2
MANY_ITEMS = 100
COMPUTED_WITH = nn.Module, Optimizer, nn.Parameter

_CHILDREN, _PARAMETERS = operator.itemgetter("_modules"), operator.itemgetter("_parameters")


def submodules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all inside them, each once, in the order of `nn.Module.modules`.

    The method itself, a generator over generators, takes four times as long.
    """
    found: dict[int, nn.Module] = {}
    stack = list(roots)[::-1]
    while stack:
        module = stack.pop()
        if id(module) not in found:
            found[id(module)] = module
            if children := module._modules:  # noqa: SLF001 - as nn.Module's own methods walk
                stack.extend(child for child in reversed(list(children.values())) if child is not None)
    return list(found.values())


class StateParts(NamedTuple):
    """What the objects of a state consist of at a moment. Do not change the lists.

    held: the modules, optimizers and parameters among the objects and what these hold. holders: of
    each module its dict of parameters. values: what these dicts hold. owned: the parameters, each
    once, by their id.
    """

    held: list[Any]
    modules: list[nn.Module]
    holders: list[dict[str, nn.Parameter | None]]
    values: list[nn.Parameter | None]
    owned: dict[int, nn.Parameter]


class Tree:
    """The modules inside some roots, as `submodules` gives them.

    Where none hangs elsewhere than at the last call, the lists are that call's own.
    """

    def __init__(self) -> None:
        self._roots: list[nn.Module] = []
        self._modules: list[nn.Module] = []
        self._attributes: list[dict[str, Any]] = []  # of each; to read there takes half the time
        self._sizes: list[int] = []  # how many children each has
        self._children: list[nn.Module | None] = []  # of all of them
        self._known = StateParts([], [], [], [], {})

    def modules(self, roots: list[nn.Module]) -> list[nn.Module]:
        """Do not change the list."""
        if not (same(roots, self._roots) and self._has_same_children()):
            self._roots, self._modules = roots, submodules(roots)
            self._attributes = list(map(vars, self._modules))
            holders = list(map(_CHILDREN, self._attributes))
            self._sizes, self._children = list(map(len, holders)), values_of(holders)
        return self._modules

    def parts(self, held: list[Any]) -> StateParts:
        """held: see StateParts."""
        modules = self.modules([thing for thing in held if isinstance(thing, nn.Module)])
        holders = list(map(_PARAMETERS, self._attributes))
        found = values_of(holders)
        if modules is not self._known.modules or not same(found, self._known.values):
            owned = {id(p): p for p in found if p is not None}
            self._known = StateParts(held, modules, holders, found, owned)
        return self._known._replace(held=held, holders=holders)

    def _has_same_children(self) -> bool:
        holders = list(map(_CHILDREN, self._attributes))
        return list(map(len, holders)) == self._sizes and same(values_of(holders), self._children)


def values_of(dicts: Sequence[dict[str, T]]) -> list[T]:
    """Of all of them, one after another."""
    return list(chain.from_iterable(map(dict.values, dicts)))


def held(thing: Any, depth: int = DEPTH) -> Iterator[Any]:
    """The object and what its attributes hold.

    What modules, optimizers and schedulers hold is their own business: torch's methods know it.
    """
    yield thing
    if isinstance(thing, (nn.Module, Optimizer, LRScheduler, Tensor)):
        return
    items = _items(thing)
    if items is None and depth > 0 and hasattr(thing, "__dict__") and not isinstance(thing, type):
        items, depth = vars(thing).values(), depth - 1
    for item in items or ():
        if not isinstance(item, (str, int, float, bytes)):
            yield from held(item, depth)


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _items(thing: Any) -> Iterable[Any] | None:
    items: Iterable[Any] = thing.values() if isinstance(thing, dict) else thing
    if not isinstance(thing, (dict, list, tuple)):
        return None
    if len(thing) <= MANY_ITEMS:
        return items
    is_of_tensors = isinstance(next(iter(items)), Tensor)
    return [item for item in items if type(item) is not Tensor] if is_of_tensors else ()
