"""Before a node leaves, the newest state in its memory is committed, within the grace period.

The node commits it itself, or sees that another one has. A drain leaves the state of its last step
in the memory of every node, not in a checkpoint: the workers need not wait for an upload, and most
drains lead to a generation that has the state in memory. But the memory of a node that leaves is
lost with it, and exit code 75 promises that its last step is saved.

It does not promise that the storage accepts the checkpoint. `newest_checkpoint` says which step is
safe, and the exit code follows from that (exit_report.py).
"""

from collections.abc import Callable
from contextlib import closing

from elastic.agent.snapshot_memory import SnapshotMemory
from elastic.checkpoint.catalog import committed, of_run
from elastic.checkpoint.record import CommitRecord
from elastic.errors import StoreFailed
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.uploader.client import UploaderClient
from elastic.uploader.protocol import SaveState

POLL_S = 0.1


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
        """store: of the run's checkpoints. report: takes lines for the console."""
        self._memory = memory
        self._store = store
        self._run_id = run_id
        self._socket = uploader_socket
        self._clock = clock
        self._report = report

    def newest_checkpoint(self) -> CommitRecord | None:
        """None where the storage holds no checkpoint of this run, or does not answer.

        The storage is asked, and not the event log: an uploader may die after its commit and before
        it records the event.
        """
        try:
            records, _ = of_run(committed(self._store, self._clock), self._run_id)
        except StoreFailed as error:
            self._report(f"the checkpoints cannot be listed: {error}")
            return None
        return max(records, key=lambda record: record.step, default=None)

    def offer_newest(self) -> None:
        """Have the uploader commit the newest snapshot; does not wait for the result."""
        with closing(UploaderClient(self._socket)) as uploader:
            try:
                self._offer(uploader)
            except StoreFailed as error:
                self._report(f"the state that a leaving node waits for is not saved: {error}")

    def ensure_committed(self, *, others: bool, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        """Return once a checkpoint holds the newest step in memory, or at the deadline.

        others: other nodes go on with the same state. They are given half of the time to commit it:
        the node of their rank 0 offers it to its uploader as soon as their next generation starts,
        and a second upload of the same bytes would only compete with theirs.
        deadline: on the monotonic clock. is_cancelled: the wait ends as soon as this is true.
        """
        newest = self._memory.newest
        step = 0 if newest is None else newest.info.step
        now_s = self._clock.monotonic()
        others_until_s = (now_s + deadline) / 2 if others else now_s
        while (is_missing := self._saved_step() < step) and not is_cancelled():
            if self._clock.monotonic() >= others_until_s:
                break
            self._clock.sleep(POLL_S)
        if is_missing:
            self._commit(step, deadline, is_cancelled)

    def _saved_step(self) -> int:
        newest = self.newest_checkpoint()
        return 0 if newest is None else newest.step

    def _commit(self, step: int, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        with closing(UploaderClient(self._socket)) as uploader:
            try:
                self._offer(uploader)
                while self._clock.monotonic() < deadline and not is_cancelled():
                    result = uploader.wait(step, POLL_S)
                    if result is not None:
                        if result.state is not SaveState.COMMITTED:
                            self._report(f"checkpoint step={step} is not saved: {result.reason}")
                        return
            except StoreFailed as error:
                self._report(f"checkpoint step={step} is not saved: {error}")

    def _offer(self, uploader: UploaderClient) -> None:
        slots, newest = self._memory.slots, self._memory.newest
        if slots is not None and newest is not None:
            uploader.offer(slots, newest, resumed_from=None, final=True)
