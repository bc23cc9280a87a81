"""Whether a step's body has changed the state, as far as that can be told in a few microseconds.

Looked at are how often trained parameters were written to, and what the Values hold. It does not
see writes through `.data`, what other objects of the state hold, and items of a list or dict beyond
the first thousand.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.train.values import Values

MAX_ITEMS = 1000
MAX_BYTES = 4096  # of an array whose contents are compared


def mark_of(parameters: Sequence[Tensor], objects: Iterable[object]) -> list[Any]:
    """Equal to an earlier mark of these where nothing was changed. objects: those of the state."""
    values = [_mark(vars(thing)) for thing in objects if isinstance(thing, Values)]
    return [[parameter._version for parameter in parameters], values]  # noqa: SLF001 - autograd's count of changes


def whole_mark_of(objects: Iterable[object]) -> list[Any]:
    """As `mark_of`, and of what a step's body may change and a function beside the loop may not:
    modes of modules, buffers, and the hyperparameters of optimizers.
    """
    return [_mark_of_object(thing) for thing in objects]


def _mark_of_object(thing: object) -> Any:
    match thing:
        case nn.Module():
            tensors = [*thing.parameters(), *thing.buffers()]
            modes = [module.training for module in thing.modules()]
            return modes, [(id(tensor), tensor._version) for tensor in tensors]  # noqa: SLF001
        case Optimizer():
            return [
                [(key, _mark(value)) for key, value in group.items() if key != "params"]
                for group in thing.param_groups
            ]
        case Values():
            return _mark(vars(thing))
        case _:
            return None


def _mark(value: Any) -> Any:
    match value:
        case Tensor():
            return id(value), value._version  # noqa: SLF001
        case np.ndarray():
            return id(value), value.tobytes() if value.nbytes <= MAX_BYTES else b""
        case list() | tuple():
            return [id(value), len(value), *map(_mark, value[:MAX_ITEMS])]
        case dict():
            return [
                id(value),
                len(value),
                *((key, _mark(item)) for key, item in islice(value.items(), MAX_ITEMS)),
            ]
        case _:
            return value
