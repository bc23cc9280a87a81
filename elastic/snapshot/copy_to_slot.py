"""A state's bytes reach a slot as they were when the copy began: never while training changes them.

From host memory the copy is made at once. From a GPU it runs beside the next step, on a stream of
its own and into pinned memory. Two fences order it with training: tensors that only an optimizer's
update changes must be copied before the next update, all others (buffers, for instance) before the
next forward. The slot is complete only after `wait`.

A recipe that changes a tensor in place while its copy runs tears the slot. The vote on the state,
which is computed before the next step, tells (train/state/snapshotting.py). A sharded state waits
for its copy.
"""

from collections.abc import Callable, Collection
from contextlib import suppress

import torch
from torch import Tensor

from elastic.snapshot import checksum, image


class HostCopy:
    """Copies tensors in host memory, on the training thread.

    A copy beside the next step cost as much, because the processors are busy then, and risked a
    torn state (docs/decisions/0009 has the figures).
    """

    is_asynchronous = False
    _checksum = ""

    def start(self, layout: image.Layout, body: memoryview, at: int = 0) -> None:
        self._checksum = image.copy_into(layout, body[at:])

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
        # By address, whole bodies of slots: what is registered must never be unmapped.
        self._pinned: dict[int, Tensor] = {}
        self._image = memoryview(b"")

    def start(self, layout: image.Layout, body: memoryview, at: int = 0) -> None:
        """Copy the tensors of a layout into a slot's body, from byte `at` on."""
        target, self._image = self._pin(body)[at:], body[at : at + layout.size_bytes]
        target[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
        addresses = self._addresses()
        # Early tensors first: the next forward waits for these alone.
        places = sorted(layout.places, key=lambda place: place[1].data_ptr() in addresses)
        num_early = sum(tensor.data_ptr() not in addresses for _, tensor in places)
        # The copy must not begin before the update whose results it copies.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, (offset, tensor) in enumerate(places):
                if number == num_early:
                    self._early_done.record(self._stream)
                flat = image.device_bytes(tensor)
                target[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
                # If the recipe frees this tensor, torch's allocator may give its memory to another
                # one on the training stream. This tells it to wait for the copy first.
                if tensor.is_cuda:  # torch.optim.Adam counts its steps in host memory
                    tensor.record_stream(self._stream)
            if num_early == len(places):
                self._early_done.record(self._stream)
            self._all_done.record(self._stream)

    def before_forward(self) -> None:
        torch.cuda.current_stream().wait_event(self._early_done)

    def before_update(self) -> None:
        torch.cuda.current_stream().wait_event(self._all_done)

    def wait(self) -> str:
        """Wait until everything is in the slot; returns the image's checksum."""
        self._all_done.synchronize()
        return checksum.of_image(self._image)

    def _pin(self, body: memoryview) -> Tensor:
        """uint8 [n] over the slot's body, its pages locked once per slot, if the driver can."""
        view = torch.frombuffer(body, dtype=torch.uint8)
        if view.data_ptr() not in self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostRegister(view.data_ptr(), view.numel(), 0)) != 0:
                # The copies are slower then. The next kernel would raise the driver's error.
                with suppress(RuntimeError):
                    torch.zeros(1, device="cuda")
            self._pinned[view.data_ptr()] = view
        return self._pinned[view.data_ptr()]


SlotCopy = HostCopy | DeviceCopy
