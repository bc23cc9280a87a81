"""What one computation of one shard took and gave, as checksums that name what differs.

Two computations of a shard are equal if their evidence is. Checksums are sums of words
(snapshot/checksum.py), with the limits that are written there; all NaNs count as one.
"""

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.train import structure
from elastic.train.audit_verdict import DATA, Evidence
from elastic.train.flat_state import tensor_sums
from elastic.train.state import State


class ShardRecord:
    """The data of one computation, and of each call of the recipe's function its result."""

    def __init__(self) -> None:
        self.gradients: dict[nn.Parameter, str] = {}
        self._data: str | None = None
        self._values: dict[int, str] = {}
        self._buffers: list[str] = []

    def add_data(self, data: Any) -> None:
        """Before the first call; later calls have the same data, perhaps changed by the first."""
        if self._data is None:
            self._data = data_checksum(data)

    def add_call(self, number: int, output: Tensor, state: State) -> None:
        """The modules have the buffers that the call left."""
        self._values[number] = tensor_checksum(output)
        self._buffers = [tensor_checksum(buffer) for buffer in _buffers(state)]

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.gradients[parameter] = tensor_checksum(gradient)

    def fingerprint(self, calls: list[int]) -> str:
        """Of all that is known of these calls, and of the gradients after them."""
        values = [self._values[number] for number in calls]
        parts = [self._data, *values, *self._buffers, *self.gradients.values()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def evidence(self, calls: list[int], state: State) -> Evidence:
        """The same by name. Parameters are in the order in which optimizers have them."""
        found = [(DATA, self._data or "")]
        found += [(f"what call {number} of the step returned", self._values[number]) for number in calls]
        buffers = zip(_buffers(state), self._buffers, strict=False)
        found += [(f"the buffer {state.name_of(buffer)}", of_buffer) for buffer, of_buffer in buffers]
        found += [
            (f"the gradient of {state.name_of(parameter)}", self.gradients[parameter])
            for parameter in state.trained
            if parameter in self.gradients
        ]
        names = Counter(name for name, _ in found)
        return {
            name if names[name] == 1 else f"{name} (entry {index})": value
            for index, (name, value) in enumerate(found)
        }


def _buffers(state: State) -> list[Tensor]:
    """Those that are part of the state. Others may be caches, whose size depends on the past."""
    return [
        buffer
        for module in structure.submodules(state.modules)
        for name, buffer in module._buffers.items()  # noqa: SLF001
        if buffer is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001
    ]


def tensor_checksum(tensor: Tensor) -> str:
    """Of a tensor's dtype, shape and bytes, where all NaNs count as one."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    # A sum costs a third of a search for NaNs, and is one if there are any. Types of one byte have
    # neither.
    if real.is_floating_point() and real.itemsize > 1 and real.sum().isnan():
        real = real.masked_fill(real.isnan(), torch.nan)
    head = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
    return hashlib.sha256(head + tensor_sums(real)).hexdigest()


def data_checksum(value: Any) -> str:
    """Of the tensors, arrays, numbers and words in nested tuples, lists and dicts.

    Anything else counts by its type alone.
    """
    match value:
        case Tensor():
            text = tensor_checksum(value)
        case np.ndarray():
            text = hashlib.sha256(value.tobytes()).hexdigest()
        case dict():
            text = repr({str(name): data_checksum(item) for name, item in value.items()})
        case list() | tuple():
            text = repr([data_checksum(item) for item in value])
        case None | bool() | int() | float() | str() | bytes():
            text = repr(value)
        case _:
            text = ""
    return hashlib.sha256(f"{type(value).__name__} {text}".encode()).hexdigest()
