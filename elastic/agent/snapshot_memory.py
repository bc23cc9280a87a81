"""A snapshot outlives every worker of its node: its memory belongs to the agent, and dies with it.

Workers write snapshots and the uploader reads them; the agent reads only their headers. It
allocates the memory when a worker asks for it on the control page, because only then the size of
the state is known, and in a thread, because the pages are reserved at once, which takes seconds for
a large state, while the workers train. Where there is no room for all slots, one is better than
none: without any, no checkpoint could be made.

A state that outgrows its slots gets larger ones in place of them. Until a snapshot lies in these, a
fault costs the steps since the newest checkpoint.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from elastic.divergence import vote_of
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.system.control_page import ControlPage

SLOTS = 3  # for the newest snapshot, for the next, and for the uploader's
SLOTS_WITHOUT_SNAPSHOTS = 1  # where states are copied only to be saved
_NICENESS = 10  # of the thread: training comes first


class SnapshotMemory:
    """`slots`: None until the workers have asked for memory."""

    def __init__(self, page: ControlPage, count: int, report: Callable[[str], None]) -> None:
        """count: of slots for one state each."""
        self.slots: SnapshotSlots | None = None
        self._page = page
        self._count = count
        self._report = report
        self._calls = ThreadPoolExecutor(1)
        self._asked_bytes = 0
        self._created: Future[SnapshotSlots] | None = None  # of `_asked_bytes`, until `_adopt`
        self._compared_step = 0  # the newest snapshot that all ranks of all nodes had compared
        self._unshared: set[int] = set()  # `seq` of those that were agreed on by this node alone

    @property
    def path(self) -> str:
        """What workers open to restore from; empty while there is no memory.

        It stays valid until each of them has opened it: they ask for larger slots later.
        """
        return "" if self.slots is None else self.slots.path

    @property
    def newest(self) -> Snapshot | None:
        """The newest snapshot that is agreed on (`Snapshot.is_agreed`)."""
        whole = [] if self.slots is None else self.slots.whole()
        return next((each for each in whole if each.is_agreed), None)

    def keep_agreed(self, votes: Sequence[Mapping[int, int]]) -> None:
        """Once the workers are gone: keep the snapshots that count, and void the others.

        votes: of each worker of this node, by step; none where votes do not count. Most snapshots
        were agreed on by all ranks. Where the workers died before their votes were exchanged, those
        of this node must be equal; nodes compare their snapshots when they restore one.
        """
        if (slots := self.slots) is None:
            return
        whole = slots.whole()
        # All nodes compared what the ended generation restored.
        self._unshared -= {each.seq for each in whole if each.info.step == self._page.restored_step}
        compared = [each.info.step for each in whole if each.is_agreed and each.seq not in self._unshared]
        self._compared_step = max(compared, default=0)
        for snapshot in whole:
            step, vote = snapshot.info.step, vote_of(snapshot.info.checksum)
            if snapshot.is_agreed:
                continue
            if votes and all(of_worker.get(step) == vote for of_worker in votes):
                slots.agree(snapshot.slot, snapshot.seq)
                self._unshared.add(snapshot.seq)
            else:
                slots.invalidate(snapshot.slot)

    def keep_compared(self) -> None:
        """The run ends, and no restore will compare newer snapshots between nodes."""
        if self.slots is not None:
            self.slots.discard_newer(self._compared_step)

    def publish(self) -> None:
        """Put the memory's descriptor on the control page, and try what was refused once more."""
        self._page.slots_fd = None if self.slots is None else self.slots.fd
        self._page.refused_bytes = 0
        # Slots that ended workers asked for must not replace those that new ones are about to open.
        self._created = self._created if self.slots is None else None

    def poll(self) -> None:
        """Allocate what the workers ask for, and publish it when it is there; never blocks."""
        if self._created is not None:
            if not self._created.done():
                return
            created, self._created = self._created, None
            try:
                self._adopt(created.result())
            except OSError as error:
                self._page.refused_bytes = self._asked_bytes  # no worker waits for it
                self._report(
                    f"no memory for one copy of the state, {self._asked_bytes / 1e6:.0f} MB ({error}): no step can be saved from this "
                    "node's memory. Stop the run, and start it with fewer workers on this node or on a machine with more memory"
                )
        wanted = self._page.wanted_bytes
        capacity = 0 if self.slots is None else self.slots.capacity_bytes
        if wanted > capacity and wanted != self._page.refused_bytes:
            self._asked_bytes = wanted
            self._created = self._calls.submit(self._create, wanted)

    def release_leases(self) -> None:
        """The uploader died, which would have returned the slots that it read."""
        if self.slots is not None:
            self.slots.release_all()

    def _create(self, size_bytes: int) -> SnapshotSlots:
        """In a thread of its own, while the workers train. Raises OSError."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            return SnapshotSlots.create(size_bytes, self._count)
        except OSError:
            return SnapshotSlots.create(size_bytes, SLOTS_WITHOUT_SNAPSHOTS)

    def _adopt(self, created: SnapshotSlots) -> None:
        if self.slots is not None:  # an uploader that still reads the old ones has them open
            self.slots.close()
        self.slots, self._unshared = created, set()
        self.publish()
        if created.num_slots < self._count:
            self._report(
                f"no memory for {self._count} snapshots of {created.capacity_bytes / 1e6:.0f} MB; there is one, "
                "which is written over in place: a fault meanwhile costs the steps since the newest checkpoint"
            )
