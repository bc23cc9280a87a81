"""A snapshot outlives every worker of its node: its memory belongs to the agent, and dies with it.

Workers write snapshots and the uploader reads them; the agent reads only their headers. It
allocates the memory when a worker asks for it on the control page, because only then the size of
the state is known, and in a thread, because the pages are reserved at once, which takes seconds for
a large state. Where there is no room for all slots, one is better than none: without any, no
checkpoint could be made.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from elastic.divergence import vote_of
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.system.control_page import ControlPage

SLOTS = 3  # the newest snapshot, one that is being written, one that is leased to the uploader
SLOTS_WITHOUT_SNAPSHOTS = 1  # where states are copied only to be saved


class SnapshotMemory:
    """`slots` is None until the workers have asked for memory."""

    def __init__(self, page: ControlPage, count: int, report: Callable[[str], None]) -> None:
        """count: of slots, each of which holds one state."""
        self.slots: SnapshotSlots | None = None
        self._page = page
        self._count = count
        self._report = report
        self._refused_bytes = 0  # the last size for which there was no memory
        self._thread: threading.Thread | None = None
        self._created: SnapshotSlots | OSError | None = None  # by the thread

    @property
    def path(self) -> str:
        """What workers open to restore from; empty while there is no memory."""
        return "" if self.slots is None else self.slots.path

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot whose state all ranks are known to have had."""
        whole = [] if self.slots is None else self.slots.whole()
        return next((snapshot for snapshot in whole if snapshot.is_agreed), None)

    def keep_agreed(self, votes: Sequence[Mapping[int, int]]) -> None:
        """Once the workers are gone: keep the snapshots that count, and void the others.

        votes: of each worker of this node, by step; none where votes do not count. Most snapshots
        were agreed on by all ranks. Where the workers died before their votes were exchanged, those
        of this node must be equal; nodes compare their snapshots when they restore one.
        """
        slots = self.slots
        if slots is None:
            return
        for snapshot in slots.whole():
            step, vote = snapshot.info.step, vote_of(snapshot.info.checksum)
            if snapshot.is_agreed:
                continue
            if votes and all(of_worker.get(step) == vote for of_worker in votes):
                slots.agree(snapshot.slot, snapshot.seq)
            else:
                slots.invalidate(snapshot.slot)

    def publish(self) -> None:
        """Write the memory's descriptor on the control page; what was refused is tried again."""
        self._page.slots_fd = None if self.slots is None else self.slots.fd
        self._refused_bytes = 0

    def poll(self) -> None:
        """Allocate what the workers ask for, and publish it when it is there; never blocks."""
        if self._thread is not None:
            if not self._thread.is_alive():
                self._thread = None
                self._adopt()
            return
        wanted = self._page.wanted_bytes
        capacity = 0 if self.slots is None else self.slots.capacity_bytes
        if wanted > capacity and wanted != self._refused_bytes:
            self._thread = threading.Thread(target=self._create, args=(wanted,), daemon=True, name="memory")
            self._thread.start()

    def release_leases(self) -> None:
        """The uploader died, which would have returned the slots that it read."""
        if self.slots is not None:
            self.slots.release_all()

    def _create(self, size_bytes: int) -> None:
        for count in (self._count, SLOTS_WITHOUT_SNAPSHOTS):
            try:
                self._created = SnapshotSlots.create(size_bytes, count)
                return
            except OSError as error:
                self._created = error

    def _adopt(self) -> None:
        created, self._created = self._created, None
        if isinstance(created, SnapshotSlots):
            # The old snapshots are lost with the old memory: their state was smaller than what the
            # workers are about to write. An uploader that still reads one has the old memory open.
            old, self.slots = self.slots, created
            if old is not None:
                old.close()
            self.publish()
            if created.num_slots < self._count:
                self._report(
                    f"no memory for {self._count} snapshots of {created.capacity_bytes / 1e6:.0f} MB; there is one, "
                    "which is written over in place: a fault meanwhile costs the steps since the newest checkpoint"
                )
            return
        self._refused_bytes = self._page.wanted_bytes
        self._report(
            f"no memory for one copy of the state, {self._refused_bytes / 1e6:.0f} MB ({created}): no step can be saved from this "
            "node's memory. Stop the run, and start it with fewer workers on this node or on a machine with more memory"
        )
