"""The functions that objects of torch call by themselves: no line of the recipe's names them there.

A schedule has functions of the epoch, an optimizer has hooks, and some are for all optimizers; a
mean of models has one that adds. What they count is no less a memory of the loop than what its own
functions do.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer, optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.data.own_files import is_own_class
from elastic.train.callables import is_wrapper

_OF_ALL_OPTIMIZERS = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks  # noqa: SLF001

# A model of 150 modules has 4000 attributes, of which almost all are one of these.
_OF_TORCH = frozenset(vars(nn.Module()))
_NO_FUNCTIONS = frozenset({bool, int, float, str, tuple, type(None)})


def functions_called_by(thing: Any) -> Iterator[Any]:
    """Functions, methods and objects that a schedule, an optimizer or a module calls."""
    if isinstance(thing, LRScheduler):
        yield from _of_schedule(vars(thing).values())
    elif isinstance(thing, Optimizer):
        held = [hooks for name, hooks in vars(thing).items() if name.endswith("_hooks") and hooks]
        for hooks in (*held, *_OF_ALL_OPTIMIZERS):
            yield from list(hooks.values())
    elif isinstance(thing, nn.Module):
        for name, value in vars(thing).items():
            if name not in _OF_TORCH and type(value) not in _NO_FUNCTIONS and is_wrapper(value):
                yield value


def _of_schedule(held: Iterable[Any]) -> Iterator[Any]:
    for each in held:
        if isinstance(each, (list, tuple)):
            yield from _of_schedule(each)
        elif isinstance(each, LRScheduler):
            yield from functions_called_by(each)
        elif is_wrapper(each) or (is_own_class(type(each)) and callable(each)):
            yield each
