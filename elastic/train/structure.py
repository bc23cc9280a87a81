"""What the objects of a state consist of is looked up whenever it is needed, and never remembered.

Recipes freeze layers, swap modules, add parameter groups and assign buffers while the loop runs.
The answer depends on the objects as they are now alone, so that it is the same in a process that
resumes. It is asked in every step: a model of 150 modules takes about a tenth of a millisecond.

It follows the attributes of an object that is no module (a trainer of the recipe's own, which
holds model and optimizer) two levels deep, and no container of more than 100 items that are not
tensors.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

DEPTH = 2
MANY_ITEMS = 100


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


def parameters(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """The parameters of these modules themselves, each once, in order, by their id."""
    return {id(p): p for module in modules for p in module._parameters.values() if p is not None}  # noqa: SLF001


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
    is_short = len(thing) <= MANY_ITEMS or isinstance(next(iter(items)), Tensor)
    return items if is_short else ()
