"""The bytes of a state go into a slot: from host memory at once, from a GPU beside the next step, and never while they are being changed.

A GPU's copy runs on a stream of its own, into memory that is pinned. Two fences order it with training: what only an update changes must be out before the next update, all the
rest before the next forward. Only after `wait` is the slot complete.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from elastic.snapshot import checksum, image
from elastic.snapshot.image import Layout


class SlotCopy(Protocol):
    def start(self, layout: Layout, body: memoryview, late: Collection[int]) -> None:
        """Copy the tensors of a layout into a slot's body. late: addresses of what nothing changes before the next update, which may go last."""

    def before_forward(self) -> None: ...

    def before_update(self) -> None: ...

    def wait(self) -> str | None:
        """Return the image's checksum when everything is in the slot; None when the recipe changed some of it meanwhile, and the slot holds two states."""


class HostCopy:
    """Tensors in host memory are copied on the training thread. Beside the next step it cost as much, where processors have work anyway (docs/log.md), and put a state at risk."""

    def __init__(self) -> None:
        self._checksum = ""

    def start(self, layout: Layout, body: memoryview, late: Collection[int]) -> None:
        self._checksum = image.copy_into(layout, body)

    def before_forward(self) -> None:
        """Nothing is under way."""

    def before_update(self) -> None:
        """Nothing is under way."""

    def wait(self) -> str:
        return self._checksum


class DeviceCopy:
    """Written after CUDA's documentation of streams and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._early_out = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._all_out = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned: dict[int, Tensor] = {}
        self._late: list[Tensor] = []
        self._versions: list[int] = []
        self._stayed = True
        self._image = memoryview(b"")

    def start(self, layout: Layout, body: memoryview, late: Collection[int]) -> None:
        target, self._image = self._pin(body), body[: layout.size_bytes]
        target[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
        places = sorted(layout.places, key=lambda place: place[1].data_ptr() in late)
        self._late = [tensor for _, tensor in places if tensor.data_ptr() in late]
        self._versions, self._stayed = _versions(self._late), True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, (offset, tensor) in enumerate(places):
                if number == len(places) - len(self._late):
                    self._early_out.record(self._stream)
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                target[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
                # The allocator must not give this memory to somebody else before the copy has read it.
                flat.record_stream(self._stream)
            if not self._late:
                self._early_out.record(self._stream)
            self._all_out.record(self._stream)

    def before_forward(self) -> None:
        torch.cuda.current_stream().wait_event(self._early_out)

    def before_update(self) -> None:
        # A recipe that clips its parameters before the step's sum, say, asked for that beside the copy. Autograd counts what is changed in place.
        self._stayed = _versions(self._late) == self._versions
        torch.cuda.current_stream().wait_event(self._all_out)

    def wait(self) -> str | None:
        self._all_out.synchronize()
        return checksum.of_image(self._image) if self._stayed else None

    def _pin(self, body: memoryview) -> Tensor:
        """uint8 [n] over the body, its pages locked, once for each slot: only then are copies from a GPU asynchronous."""
        view = torch.frombuffer(body, dtype=torch.uint8)
        if view.data_ptr() not in self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = runtime.cudaHostRegister(view.data_ptr(), view.numel(), 0)
            if int(error) != 0:
                raise OSError(
                    f"cudaHostRegister of a slot of {view.numel()} bytes failed: error {int(error)}"
                )
            self._pinned[view.data_ptr()] = view
        return self._pinned[view.data_ptr()]


def _versions(tensors: list[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - autograd's count of changes in place
