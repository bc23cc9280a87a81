"""A snapshot in this node's memory is used only if all ranks agreed on it and its bytes stayed.

The bytes of the newest one are compared with its checksum at once; those of an older one when it is
needed. One that changed is never forgotten silently: a run that has no other state must not start
over.
"""

from typing import Any

import torch
from torch import Tensor

from elastic.errors import CheckpointDamaged
from elastic.snapshot import checksum
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.train.state.candidates import OfferedSnapshot, RejectedState


class LocalSnapshots:
    """Newest first. damaged: those whose bytes changed."""

    def __init__(self, slots: SnapshotSlots | None) -> None:
        self._slots = slots
        self._by_step: dict[int, Snapshot] = {}
        self.damaged: list[RejectedState] = []
        for snapshot in [] if slots is None else slots.whole():
            if snapshot.is_agreed and (self._by_step or self._is_intact(snapshot)):
                self._by_step.setdefault(snapshot.info.step, snapshot)

    @property
    def offers(self) -> tuple[OfferedSnapshot, ...]:
        infos = [snapshot.info for snapshot in self._by_step.values()]
        return tuple(
            OfferedSnapshot(step=info.step, checksum=info.checksum, generation=info.generation)
            for info in infos
        )

    def line(self, step: int) -> dict[str, Any] | None:
        """The step's line of the metrics, if its snapshot kept it."""
        snapshot = self._by_step.get(step)
        return None if snapshot is None else snapshot.info.line

    def image(self, step: int) -> Tensor:
        """uint8 [n], a view of the slot: valid until the next snapshot is written.

        Raises CheckpointDamaged when it is not what was written.
        """
        snapshot = self._by_step[step]
        if not self._is_intact(snapshot):
            raise CheckpointDamaged(self.damaged[-1].reason)
        return torch.frombuffer(self._body(snapshot), dtype=torch.uint8)

    def discard_newer(self, step: int) -> None:
        """Training resumes from `step`: what is newer belongs to steps that will be done again."""
        if self._slots is not None:
            self._slots.discard_newer(step)

    def close(self) -> None:
        """Give the memory back once training resumes: if the state outgrows it, the agent makes
        larger slots, and these would stay for as long as one worker has them open.
        """
        if self._slots is not None:
            self._slots.close()
        self._slots, self._by_step = None, {}

    def _is_intact(self, snapshot: Snapshot) -> bool:
        if checksum.of_image(self._body(snapshot)) == snapshot.info.checksum:
            return True
        reason = "its bytes changed in memory after it was written"
        self.damaged.append(RejectedState(step=snapshot.info.step, reason=reason, is_stored=False))
        assert self._slots is not None
        self._slots.invalidate(snapshot.slot)
        return False

    def _body(self, snapshot: Snapshot) -> memoryview:
        assert self._slots is not None
        return self._slots.body(snapshot.slot)[: snapshot.size_bytes]
