"""What the objects of a state consist of is looked up whenever it is needed, and never trusted.

Recipes freeze layers, swap modules, add parameter groups and assign buffers while the loop runs.
The answer depends on the objects as they are now alone, so that it is the same in a process that
resumes. It is asked in every step. So a walk through the modules is not done again where all of
them hold the same objects (Parts): for 150 modules that takes a fifth of a walk.

It follows the attributes of an object that is no module (a trainer of the recipe's own, which
holds model and optimizer) two levels deep, and no container of more than 100 items, but for the
parameters in a container that begins with a tensor: an optimizer of the recipe's own has such a
list, and in a memory of many thousand tensors only their types are looked at.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

T = TypeVar("T")

DEPTH = 2
MANY_ITEMS = 100
COMPUTED_WITH = nn.Module, Optimizer, nn.Parameter

_CHILDREN, _PARAMETERS, _BUFFERS = map(operator.itemgetter, ("_modules", "_parameters", "_buffers"))
_GROUPS, _OF_GROUP = operator.attrgetter("param_groups"), operator.itemgetter("params")


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


class Parts:
    """What the objects of a State consist of at a moment. Do not change its lists.

    found: the modules, optimizers and parameters among the objects and what these hold. modules:
    all inside the modules found, each once. holders: of each its dict of parameters; values: what
    these dicts hold. owned: the parameters, each once, by their id. trained: those that an
    optimizer updates, in the order of the modules; held: of these, those that an optimizer of torch
    holds. idle: those of the modules that no optimizer updates.

    An optimizer of the recipe's own is an object that holds parameters. Without any optimizer among
    the objects all parameters are trained. Those of an EMA copy are not.
    """

    def __init__(self, found: Sequence[Any]) -> None:
        self.found = found
        self.modules = submodules(thing for thing in found if isinstance(thing, nn.Module))
        self._attributes = list(map(vars, self.modules))  # to read there takes half the time
        self._optimizers = [thing for thing in found if isinstance(thing, Optimizer)]
        self._consist_of = self._now()
        self.holders: list[dict[str, nn.Parameter | None]] = list(map(_PARAMETERS, self._attributes))
        self.values = values_of(self.holders)
        self.owned = {id(p): p for p in self.values if p is not None}
        by_torch = {id(p): p for o in self._optimizers for group in o.param_groups for p in group["params"]}
        updated = by_torch | {id(thing): thing for thing in found if isinstance(thing, nn.Parameter)}
        outside = [p for name, p in updated.items() if name not in self.owned]
        self.trained = [p for name, p in self.owned.items() if name in updated or not updated] + outside
        self.idle = [p for name, p in self.owned.items() if name not in updated and updated]
        self.held = [p for p in self.trained if id(p) in by_torch]

    def has_changed(self) -> bool:
        """Whether they consist of other objects now, or in another order."""
        now, known = self._now(), self._consist_of
        return len(now) != len(known) or not all(map(operator.is_, now, known))

    def has_same_values(self) -> bool:
        """Whether the modules have the same parameters still."""
        return same(values_of(self.holders), self.values)

    def _now(self) -> list[Any]:
        """It is asked in every step, so that it makes few calls of Python."""
        dicts = [map(name, self._attributes) for name in (_CHILDREN, _PARAMETERS, _BUFFERS)]
        of_groups = map(_OF_GROUP, chain.from_iterable(map(_GROUPS, self._optimizers)))
        found = chain(map(dict.values, filter(None, chain.from_iterable(dicts))), of_groups)
        return list(chain.from_iterable(found))


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
