"""The bytes of a state go into a slot beside the next step, and a slot that holds two states at once is never published.

Everything that only an optimizer's update changes is copied while the next step computes; the rest is out before that step begins. Two fences order this with training:
`before_forward` and `before_update`. `complete` runs on a thread of its own, and says whether what it copied stayed as it was.
"""

import threading
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from elastic.snapshot import image
from elastic.snapshot.image import Layout

PROBATION = 2

Places = list[tuple[int, Tensor]]


class Transfer(Protocol):
    def start(self, layout: Layout, body: memoryview, late: Collection[int], *, now: bool) -> None:
        """Begin to copy the tensors of a layout into a slot's body; now: there is no next step, copy on this thread.

        late: addresses of what nobody changes before the next update; all else is out before the next forward.
        """

    def before_forward(self) -> None: ...

    def before_update(self) -> None: ...

    def complete(self) -> bool:
        """Return when everything is in the slot; False when it changed meanwhile. On any thread."""


class HostTransfer:
    """A thread copies from host memory, on a processor that is idle or waits for peers.

    A recipe that changes its parameters before the step's sum would change them under the copy. In-place operations count versions, which shows them; writing through
    `.data` or numpy does not, so the first snapshots of a process are copied on the training thread, and compared before the next update. A recipe
    that is found out keeps that way of copying.
    """

    def __init__(self) -> None:
        self._is_out = threading.Event()
        self._is_out.set()
        self._late: Places = []
        self._versions: list[int] = []
        self._body: memoryview | None = None
        self._on_probation = PROBATION
        self._stays = True  # nothing was seen that changes early

    def start(self, layout: Layout, body: memoryview, late: Collection[int], *, now: bool) -> None:
        self._body = body
        self._late = [place for place in layout.places if place[1].data_ptr() in late]
        if now or not self._stays or self._on_probation:
            image.copy_into(layout, body)
            self._versions = []
            return
        self._versions = _versions(self._late)
        body[: len(layout.head)] = layout.head
        image.copy_tensors((p for p in layout.places if p[1].data_ptr() not in late), body)
        self._is_out.clear()

    def before_forward(self) -> None:
        """What a forward may change is copied at once."""

    def before_update(self) -> None:
        self._is_out.wait()
        if self._on_probation and self._body is not None:
            self._on_probation -= 1
            self._stays &= all(_is_in(self._body, offset, tensor) for offset, tensor in self._late)
        self._body, self._late = None, []

    def complete(self) -> bool:
        if self._is_out.is_set():
            return True
        try:
            assert self._body is not None
            image.copy_tensors(self._late, self._body)
            stayed = _versions(self._late) == self._versions
            self._stays &= stayed
            return stayed
        finally:
            self._is_out.set()


class DeviceTransfer:
    """Copies from a GPU run on a stream of their own, into pinned memory. Written after CUDA's documentation of streams and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._early_out = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._all_out = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned: dict[int, Tensor] = {}
        self._late: Places = []
        self._versions: list[int] = []
        self._stayed = True

    def start(self, layout: Layout, body: memoryview, late: Collection[int], *, now: bool) -> None:
        target = self._pin(body)
        target[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
        early = [place for place in layout.places if place[1].data_ptr() not in late]
        self._late = [place for place in layout.places if place[1].data_ptr() in late]
        self._versions, self._stayed = _versions(self._late), True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(early, target)
            self._early_out.record(self._stream)
            self._copy(self._late, target)
            self._all_out.record(self._stream)
        if now:
            self._all_out.synchronize()

    def before_forward(self) -> None:
        torch.cuda.current_stream().wait_event(self._early_out)

    def before_update(self) -> None:
        # The host is ahead of the copy: a change that it asked for by now may be carried out under it.
        self._stayed = _versions(self._late) == self._versions
        torch.cuda.current_stream().wait_event(self._all_out)

    def complete(self) -> bool:
        self._all_out.synchronize()
        return self._stayed

    def _copy(self, places: Places, target: Tensor) -> None:
        for offset, tensor in places:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            target[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
            # The allocator must not give this memory to somebody else before the copy has read it.
            flat.record_stream(self._stream)

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


def _versions(places: Places) -> list[int]:
    return [tensor._version for _, tensor in places]  # noqa: SLF001 - autograd's count of changes in place


def _is_in(body: memoryview, offset: int, tensor: Tensor) -> bool:
    """Whether an image still holds this tensor as it is."""
    stored = torch.frombuffer(body, dtype=torch.uint8)[offset : offset + tensor.nbytes]
    return torch.equal(stored, image.tensor_bytes(tensor))
