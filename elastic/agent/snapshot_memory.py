"""The node's snapshots belong to its agent: they outlive every worker, and one that was lent for a checkpoint is given back whoever dies.

The agent makes the memory when workers ask for it through the control page, in a thread, because preallocating takes time; it never looks into a state.
"""

import threading
from collections.abc import Callable

from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.system.control_page import ControlPage

SLOTS = 3
SLOTS_WITHOUT_SNAPSHOTS = 1


class SnapshotMemory:
    def __init__(self, page: ControlPage, slots: int, report: Callable[[str], None]) -> None:
        """slots: three, so that one holds the newest state, one is written and one is lent; one where states are kept for checkpoints alone."""
        self._page = page
        self._slots = slots
        self._report = report
        self._area: SnapshotSlots | None = None
        self._refused_bytes = 0
        self._thread: threading.Thread | None = None
        self._made: SnapshotSlots | OSError | None = None

    @property
    def area(self) -> SnapshotSlots | None:
        return self._area

    @property
    def path(self) -> str:
        """Where workers open it to restore from; empty while there is none."""
        return "" if self._area is None else self._area.path

    @property
    def newest(self) -> Snapshot | None:
        return None if self._area is None else self._area.newest()

    def publish(self) -> None:
        """To a new generation, whose page is empty."""
        self._page.slots_fd = None if self._area is None else self._area.fd

    def poll(self) -> None:
        """Make what the workers ask for; called at every look, never blocks."""
        if self._thread is not None:
            if not self._thread.is_alive():
                self._thread = None
                self._adopt()
            return
        wanted = self._page.wanted_bytes
        if wanted > self._capacity_bytes and wanted != self._refused_bytes:
            self._thread = threading.Thread(target=self._make, args=(wanted,), daemon=True, name="memory")
            self._thread.start()

    def release_leases(self) -> None:
        """The uploader that had them is dead."""
        if self._area is not None:
            self._area.release_all()

    @property
    def _capacity_bytes(self) -> int:
        return 0 if self._area is None else self._area.capacity_bytes

    def _make(self, size_bytes: int) -> None:
        try:
            self._made = SnapshotSlots.create(size_bytes, self._slots)
        except OSError as error:
            self._made = error

    def _adopt(self) -> None:
        made, self._made = self._made, None
        if isinstance(made, SnapshotSlots):
            # The old one goes with its snapshots: workers that outgrew it are about to write a newer one. An uploader that reads from it has it open itself.
            old, self._area = self._area, made
            if old is not None:
                old.close()
            self.publish()
            return
        self._refused_bytes = self._page.wanted_bytes
        self._report(
            f"no memory for {self._slots} snapshots of {self._refused_bytes / 1e6:.0f} MB ({made}); "
            "training goes on without, and a fault costs the steps since the newest checkpoint"
        )
