"""Whoever takes the last state along commits it, or sees that somebody else did, for as long as its grace lasts.

The state lies in the node's memory, where its workers left it. It does not promise that the storage takes it: `safe_step` says which step is safe.
"""

from collections.abc import Callable

from elastic.agent.snapshot_memory import SnapshotMemory
from elastic.checkpoint.catalog import committed, of_run
from elastic.checkpoint.record import CommitRecord
from elastic.errors import StoreFailed
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.uploader.client import UploaderClient
from elastic.uploader.protocol import SaveState

LOOK_S = 0.1


class FinalCheckpoint:
    def __init__(
        self,
        memory: SnapshotMemory,
        store: Store,
        *,
        run_id: str,
        uploader_socket: str,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        self._memory = memory
        self._store = store
        self._run_id = run_id
        self._socket = uploader_socket
        self._clock = clock
        self._report = report

    def newest_checkpoint(self) -> CommitRecord | None:
        """The storage's word, and not an event's: a save may have lost its writer right after it was committed. None where there is none, or the storage does not answer."""
        try:
            records, _ = of_run(committed(self._store, self._clock), self._run_id)
        except StoreFailed as error:
            self._report(f"the checkpoints cannot be listed: {error}")
            return None
        return max(records, key=lambda record: record.step, default=None)

    def safe_step(self) -> int:
        """The newest step that a checkpoint holds; 0 for none."""
        newest = self.newest_checkpoint()
        return 0 if newest is None else newest.step

    def offer_newest(self) -> None:
        """Have the newest state of this node's memory committed, beside training; the uploader answers nobody."""
        uploads = UploaderClient(self._socket)
        try:
            self._offer(uploads)
        except StoreFailed as error:
            self._report(f"the state that a leaving node waits for is not saved: {error}")
        finally:
            uploads.close()

    def ensure_committed(self, *, others: bool, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        """Return once a checkpoint holds the newest step in memory, or after `deadline` on the monotonic clock.

        others: other nodes go on with the same state, and commit it while they train; a part of the time is theirs. `is_cancelled` ends the waiting at once.
        """
        newest = self._memory.newest
        step = 0 if newest is None else newest.info.step
        now = self._clock.monotonic()
        theirs_until = (now + deadline) / 2 if others else now
        while (
            (safe := self.safe_step()) < step
            and self._clock.monotonic() < theirs_until
            and not is_cancelled()
        ):
            self._clock.sleep(LOOK_S)
        if safe < step:
            self._commit(step, deadline, is_cancelled)

    def _commit(self, step: int, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        uploads = UploaderClient(self._socket)
        try:
            self._offer(uploads)
            while self._clock.monotonic() < deadline and not is_cancelled():
                result = uploads.wait(step, LOOK_S)
                if result is not None:
                    if result.state is not SaveState.COMMITTED:
                        self._report(f"checkpoint step={step} is not saved: {result.reason}")
                    return
        except StoreFailed as error:
            self._report(f"checkpoint step={step} is not saved: {error}")
        finally:
            uploads.close()

    def _offer(self, uploads: UploaderClient) -> None:
        area, newest = self._memory.area, self._memory.newest
        if area is not None and newest is not None:
            uploads.offer(area, newest, resumed_from=None, final=True)
