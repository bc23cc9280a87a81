"""Whether a step's body has changed the state, as far as that can be told without a copy of it.

Looked at are how often trained parameters were written to, and all that the Values hold. It does
not see writes through `.data` or NumPy, nor what other objects of the state hold.
"""

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.train.values import Values

_UNCHANGING = {bool, int, float, str, type(None)}


def mark_of(parameters: Sequence[Tensor], objects: Iterable[object]) -> list[Any]:
    """Equal to an earlier mark of these where nothing was changed. objects: those of the state."""
    values = [_mark(vars(thing)) for thing in objects if isinstance(thing, Values)]
    return [[parameter._version for parameter in parameters], values]  # noqa: SLF001 - autograd's count of changes


def whole_mark_of(objects: Iterable[object]) -> list[Any]:
    """As `mark_of`, and of what a step's body may change and a function beside the loop may not:
    numbers and hooks of modules, what trains, buffers, and all of optimizers.
    """
    return [_mark_of_object(thing) for thing in objects]


def _mark_of_object(thing: object) -> Any:
    match thing:
        case nn.Module():
            return [
                (_settings_of(module), *map(_mark_of_tensor, _tensors_of(module)))
                for module in thing.modules()
            ]
        case Optimizer():
            return [
                [(key, _mark(value)) for key, value in group.items() if key != "params"]
                for group in thing.param_groups
            ] + [_mark(of_parameter) for of_parameter in thing.state.values()]
        case Values():
            return _mark(vars(thing))
        case _:
            return None


def _settings_of(module: nn.Module) -> list[Any]:
    """Its mode, numbers such as a momentum, and its hooks; another object may be a cache."""
    return [
        (name, value if type(value) in _UNCHANGING else tuple(value))
        for name, value in vars(module).items()
        if type(value) in _UNCHANGING or (isinstance(value, dict) and name.endswith("_hooks"))
    ]


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Those of its own; `parameters` and `buffers` take several times as long."""
    found = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
    return [tensor for tensor in found if tensor is not None]


def _mark_of_tensor(tensor: Tensor) -> Any:
    return id(tensor), tensor._version, tensor.requires_grad  # noqa: SLF001


def _mark(value: Any) -> Any:
    match value:
        case Tensor():
            return id(value), value._version  # noqa: SLF001
        case np.ndarray() if value.dtype != object:
            return id(value), value.dtype, value.shape, zlib.crc32(np.ascontiguousarray(value).data)
        case np.ndarray():
            return id(value), value.shape, _marks(value.ravel().tolist())
        case list() | tuple():
            return id(value), _marks(value)
        case dict():
            return id(value), tuple(value), _marks(value.values())
        case _:
            return value


def _marks(values: Collection[Any]) -> Any:
    """What cannot change is its own mark: a long list of numbers is compared fast."""
    return tuple(values) if _UNCHANGING.issuperset(map(type, values)) else [*map(_mark, values)]
