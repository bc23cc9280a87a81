"""A state's bytes reach a slot as they were when the copy began: never while training changes them.

From host memory the copy is made at once. From a GPU it runs beside the next step, on a stream of
its own and into pinned memory. Two fences order it with training: tensors that only an optimizer's
update changes must be copied before the next update, all others (buffers, for instance) before the
next forward. The slot is complete only after `wait`.

It does not see changes that go past autograd, such as a write through `.data` between a step's
begin and its sum.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from elastic.snapshot import checksum, image
from elastic.snapshot.image import Layout


class HostCopy:
    """Copies tensors in host memory, on the training thread.

    A copy beside the next step cost as much, because the processors are busy then, and risked a
    torn state (docs/decisions/0009 has the figures).
    """

    is_asynchronous = False

    def __init__(self) -> None:
        self._checksum = ""

    def start(self, layout: Layout, body: memoryview) -> None:
        self._checksum = image.copy_into(layout, body)

    def before_forward(self) -> None:
        """Nothing is under way."""

    def before_update(self) -> None:
        """Nothing is under way."""

    def wait(self) -> str:
        return self._checksum


class DeviceCopy:
    """Copies tensors from a GPU, as CUDA's documentation of streams and pinned memory describes.

    A copy between device and host runs beside kernels only if it is on another stream and the host
    memory is pinned; else it stops the training stream until it is done.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device, late: Callable[[], Collection[int]]) -> None:
        """late: gives the addresses of tensors that nothing changes before the next update."""
        self._addresses = late
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._early_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._all_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned: dict[int, Tensor] = {}
        self._late: list[Tensor] = []
        self._versions: list[int] = []
        self._is_intact = True
        self._image = memoryview(b"")

    def start(self, layout: Layout, body: memoryview) -> None:
        """Copy the tensors of a layout into a slot's body."""
        target, self._image = self._pin(body), body[: layout.size_bytes]
        target[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
        addresses = self._addresses()
        # Early tensors first: the next forward waits for these alone.
        places = sorted(layout.places, key=lambda place: place[1].data_ptr() in addresses)
        self._late = [tensor for _, tensor in places if tensor.data_ptr() in addresses]
        self._versions, self._is_intact = _versions(self._late), True
        # The copy must not begin before the update whose results it copies.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, (offset, tensor) in enumerate(places):
                if number == len(places) - len(self._late):
                    self._early_done.record(self._stream)
                flat = image.device_bytes(tensor)
                target[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
                # If the recipe frees this tensor, torch's allocator may give its memory to another
                # one on the training stream. This tells it to wait for the copy first.
                flat.record_stream(self._stream)
            if not self._late:
                self._early_done.record(self._stream)
            self._all_done.record(self._stream)

    def before_forward(self) -> None:
        torch.cuda.current_stream().wait_event(self._early_done)

    def before_update(self) -> None:
        # If the recipe changed a parameter in place while the copy was running (it clipped weights
        # before the step's sum, for instance), autograd has counted the change, and the slot is
        # torn.
        self._is_intact = _versions(self._late) == self._versions
        torch.cuda.current_stream().wait_event(self._all_done)

    def wait(self) -> str | None:
        """Wait until everything is in the slot; returns the image's checksum.

        None when the recipe changed a tensor during the copy: the slot holds parts of two states.
        """
        self._all_done.synchronize()
        return checksum.of_image(self._image) if self._is_intact else None

    def _pin(self, body: memoryview) -> Tensor:
        """uint8 [n] over the slot's body, its pages locked once per slot.

        Raises OSError when the driver cannot lock that much memory.
        """
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


SlotCopy = HostCopy | DeviceCopy


def _versions(tensors: list[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - autograd's count of changes in place
