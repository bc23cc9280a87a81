"""What one computation of one shard took and gave, as checksums that name what differs.

Two computations of a shard are equal if their evidence is. Data have a fingerprint
(data/fingerprint.py). Checksums of other tensors are sums of words (snapshot/checksum.py), with the
limits that are written there; all NaNs count as one.
"""

import hashlib
from collections import Counter
from typing import Any

from torch import Tensor, nn

from elastic.data.fingerprint import fingerprint, real_numbers
from elastic.proof.audit_verdict import DATA, GRADIENT, Evidence
from elastic.train.state import structure
from elastic.train.state.flat import tensor_sums
from elastic.train.state.state import State


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
            self._data = fingerprint(data)

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
            (f"{GRADIENT}{state.name_of(parameter)}", self.gradients[parameter])
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
    head = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
    return hashlib.sha256(head + tensor_sums(real_numbers(tensor))).hexdigest()
