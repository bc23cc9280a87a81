"""Whether a step's body has changed the state, as far as that can be told without a copy of it.

Looked at are how often trained parameters were written to, and what the Values hold. It does not
see writes through `.data` or NumPy, nor what other objects of the state hold; and of arrays and
lists that are larger than a megabyte, `mark_of` sees the two ends alone, as it is taken each step.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.train.values import Values

_UNCHANGING = {bool, int, float, str, type(None)}
_END_BYTES = 2**19  # of each end of a large array
_END_ITEMS = 2**16


def mark_of(parameters: Sequence[Tensor], objects: Iterable[object]) -> list[Any]:
    """Equal to an earlier mark of these where nothing was changed. objects: those of the state."""
    values = [_mark(vars(thing), is_whole=False) for thing in objects if isinstance(thing, Values)]
    return [versions_of(parameters), values]


def versions_of(parameters: Sequence[Tensor]) -> list[int]:
    return [parameter._version for parameter in parameters]  # noqa: SLF001 - autograd's count of changes


def whole_mark_of(objects: Iterable[object]) -> list[Any]:
    """Of all that the Values hold, and of what a step's body may change and a function beside the
    loop may not: numbers and hooks of modules, what trains, buffers, and all of optimizers.
    """
    return [_mark_of_object(thing) for thing in objects]


@contextmanager
def looks_forgotten(objects: Iterable[object]) -> Iterator[None]:
    """A look at `optimizer.state[parameter]` adds an empty entry where there is none: no change."""
    optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
    known = [{id(parameter) for parameter in optimizer.state} for optimizer in optimizers]
    try:
        yield
    finally:
        for optimizer, before in zip(optimizers, known, strict=True):
            for parameter in [each for each, held in optimizer.state.items() if not held]:
                if id(parameter) not in before:
                    del optimizer.state[parameter]


def _mark_of_object(thing: object) -> Any:
    match thing:
        case nn.Module():
            return [
                (_settings_of(module), *map(_mark_of_tensor, _tensors_of(module)))
                for module in thing.modules()
            ]
        case Optimizer():
            return [
                [
                    (key, _mark(value)) if key != "params" else [*map(id, value)]
                    for key, value in group.items()
                ]
                for group in thing.param_groups
            ] + [_settings_of(thing), *(_mark(of_parameter) for of_parameter in thing.state.values())]
        case Values():
            return _mark(vars(thing))
        case _:
            return None


def _settings_of(thing: nn.Module | Optimizer) -> list[Any]:
    """Its mode, numbers such as a momentum, and its hooks; another object may be a cache."""
    return [
        (name, value if type(value) in _UNCHANGING else tuple(value))
        for name, value in vars(thing).items()
        if type(value) in _UNCHANGING or (isinstance(value, dict) and name.endswith("_hooks"))
    ]


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Those of its own; `parameters` and `buffers` take several times as long."""
    found = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
    return [tensor for tensor in found if tensor is not None]


def _mark_of_tensor(tensor: Tensor) -> Any:
    hooks: Any = tensor._backward_hooks  # noqa: SLF001 - an empty dict, no longer None, once one was removed
    return id(tensor), tensor._version, tensor.requires_grad, tuple(hooks or ())  # noqa: SLF001


def _mark(value: Any, *, is_whole: bool = True) -> Any:
    match value:
        case Tensor():
            return id(value), value._version  # noqa: SLF001
        case np.ndarray() if value.dtype != object:
            return id(value), value.dtype, value.shape, _checksum(value, is_whole=is_whole)
        case np.ndarray():
            return id(value), value.shape, _marks(value.ravel().tolist(), is_whole=is_whole)
        case list() | tuple():
            return id(value), len(value), _marks(value, is_whole=is_whole)
        case dict():
            keys, values = [*value], [*value.values()]
            marks = _marks(keys, is_whole=is_whole), _marks(values, is_whole=is_whole)
            return id(value), len(value), marks
        case _:
            return value


def _checksum(array: Any, *, is_whole: bool) -> int:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    if is_whole or data.nbytes <= 2 * _END_BYTES:
        return zlib.crc32(data)
    return zlib.crc32(data[-_END_BYTES:], zlib.crc32(data[:_END_BYTES]))


def _marks(values: Sequence[Any], *, is_whole: bool) -> Any:
    """What cannot change is its own mark: a long list of numbers is compared fast."""
    if not is_whole and len(values) > 2 * _END_ITEMS:
        values = [*values[:_END_ITEMS], *values[-_END_ITEMS:]]
    if _UNCHANGING.issuperset(map(type, values)):
        return tuple(values)
    return [_mark(each, is_whole=is_whole) for each in values]
