"""Before a node leaves, the newest state in its memory is committed, within the grace period.

The node commits it itself, or sees that another one has, with the same state. A drain leaves the
state of its last step in the memory of every node, not in a checkpoint: the workers need not wait
for an upload, and most drains lead to a generation that has the state in memory. But the memory of
a node that leaves is lost with it, and exit code 75 promises that no step is lost.

A checkpoint that the run has passed over, because it is damaged, does not count: training fell back
behind it. It does not promise that the storage accepts the checkpoint. The exit code follows from
`newest_checkpoint` (exit_report.py), which reads no payload that this run has written itself.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from elastic.agent.calls import GivenUp
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.snapshot_memory import SnapshotMemory
from elastic.checkpoint.catalog import commits_of_step, list_commits, of_run
from elastic.checkpoint.commit import other_state_text
from elastic.checkpoint.payload_check import check_once
from elastic.checkpoint.record import CommitRecord
from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.events import CheckpointDiffers
from elastic.observe.log import EventLog
from elastic.snapshot.slots import Snapshot
from elastic.storage.store import READ_LIMIT_S, Store
from elastic.system.clock import Clock
from elastic.system.leave_deadline import Share
from elastic.uploader.client import (
    FINAL_OFFER_S,
    SAY_AFTER_S,
    UploaderClient,
    UploaderProcess,
    finish_limit_s,
)
from elastic.uploader.protocol import SaveState

POLL_S = 0.1
LOOK_SHARE = 0.25  # of the time that is left for a save: how long to look whether it is needed
RETRY_S, LONGEST_RETRY_S = 0.5, 2.0  # pauses between the tries of a save


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalCheckpoint:
    """store: of the run's checkpoints. report: takes lines for the console. differences: why a
    state is not saved, where its step was committed before with another one. log: of the agent.
    """

    memory: SnapshotMemory
    store: Store
    run_id: str
    uploader_socket: str
    shutdown: ShutdownRequest
    clock: Clock
    report: Callable[[str], None]
    log: EventLog
    differences: list[str] = field(default_factory=list)
    _loads: dict[str, bool] = field(default_factory=dict)  # by the payload's name
    _reported: set[str] = field(default_factory=set)

    def newest_checkpoint(self, *, step: int, generation: int, is_new: bool = False) -> CommitRecord | None:
        """None where the storage holds no checkpoint of this run, or does not answer.

        step: the last that was trained, in this generation; 0 where this node does not know it.
        is_new: it was trained, and not only restored: a checkpoint of it from an older generation
        may be one that the run passed over, so it counts only if it loads. The storage is asked,
        and not the event log: an uploader may die after its commit and before it records the event.
        """

        def counts(record: CommitRecord) -> bool:
            if not step or record.step < step or record.generation >= generation:
                return self._loads.get(record.payload, True)
            if record.step > step:
                return False
            return self._is_whole(record, Share.REPORT) if is_new else self._loads.get(record.payload, True)

        found = self._records(Share.REPORT, READ_LIMIT_S, step=step)
        return max(filter(counts, found), key=lambda record: record.step, default=None)

    def offer_newest(self) -> None:
        """Have the uploader commit the newest snapshot; does not wait for the result."""
        if problem := self._commit(None).reason:
            self.report(f"the newest state is not saved: {problem}")

    def ensure_committed(
        self,
        *,
        others: bool,
        meanwhile: Callable[[], object] = lambda: None,
        before_retry: Callable[[], object] = lambda: None,
    ) -> None:
        """Return once a checkpoint holds the newest step in memory, or the time for it is over.

        A save that fails is tried again: the uploader may have been killed, or the disk full for a
        moment.

        others: other nodes go on with the same state. They are given half of the time to commit it:
        the node of their rank 0 offers it to its uploader as soon as their next generation starts,
        and a second upload of the same bytes would only compete with theirs. Where their generation
        fences the save of this node, they are given the rest. What they commit is compared with
        what this node has. meanwhile: called several times a second. before_retry: after a save
        that failed.
        """
        newest, now_s = self.memory.newest, self.clock.monotonic()
        if newest is None:
            return
        step, pause_s = newest.info.step, RETRY_S
        last: _Try | None = None

        def end_s() -> float:
            return self.shutdown.end_s(Share.SAVE, now_s, self.shutdown.grace_s)

        def is_over() -> bool:
            return self.clock.monotonic() >= end_s()

        def look() -> list[CommitRecord]:
            # A store that does not answer this may still take a save.
            return self._records(Share.SAVE, (end_s() - self.clock.monotonic()) * LOOK_SHARE)

        next_try_s = (now_s + end_s()) / 2 if others else now_s

        records = look()
        while not any(self._has(record, newest) for record in records):
            is_fenced = last is not None and last.state is SaveState.FENCED
            if last is not None and (is_over() or (is_fenced and not others)):
                self.report(f"checkpoint step={step} is not saved: {last.reason}")
                return
            # One try is made also where no time is left: a save that is handed over may still end.
            if not is_fenced and (is_over() or self.clock.monotonic() >= next_try_s):
                is_first, last = last is None, self._commit(is_over, meanwhile)
                if last.state is SaveState.COMMITTED:
                    self.shutdown.saved(step)
                if last.state in (SaveState.COMMITTED, SaveState.DIFFERS):
                    return
                if is_first and not is_over() and last.state is not SaveState.FENCED:
                    self.report(f"checkpoint step={step} is not saved yet, and is tried again: {last.reason}")
                next_try_s, pause_s = self.clock.monotonic() + pause_s, min(2 * pause_s, LONGEST_RETRY_S)
                if last.state is not SaveState.FENCED and not is_over():
                    before_retry()
            meanwhile()
            self.clock.sleep(POLL_S)
            records = look()
        # Retention may have deleted the step for a newer one: then there is nothing to compare.
        same = (record for record in records if record.step == step)
        if found := next((record for record in same if self._loads.get(record.payload, True)), None):
            self._compare(newest, found)
        if not self.differences:
            self.shutdown.saved(step)

    def finish_saves(self, uploader: UploaderProcess) -> None:
        """Stop the uploader once it has finished its saves, or has had the time that they take."""
        slots, began_s, is_said = self.memory.slots, self.clock.monotonic(), False
        limit_s = finish_limit_s(0 if slots is None else slots.capacity_bytes)
        while (
            self.clock.monotonic() < self.shutdown.end_s(Share.SAVE, began_s, limit_s)
            and uploader.ends(POLL_S) is None
        ):
            if (
                not is_said
                and self.shutdown.reason is None
                and self.clock.monotonic() >= began_s + SAY_AFTER_S
            ):
                is_said = True
                self.report(
                    f"this node waits for its save in progress, {limit_s:.0f} s at most; SIGTERM or Ctrl-C shortens that to --grace"
                )
        uploader.stop(0.0)

    def _records(self, share: Share, longest_s: float, *, step: int = 0) -> list[CommitRecord]:
        """step: asked for by name where the listing, which may be old, has none as new as it."""
        until_s = self.shutdown.end_s(share, self.clock.monotonic(), longest_s)

        def look() -> list[CommitRecord]:
            records = of_run(list_commits(self.store, self.clock, until_s), self.run_id)[0]
            if step > max((record.step for record in records), default=0):
                named = commits_of_step(self.store, step, self.clock, until_s)
                records += of_run(named, self.run_id)[0]
            return records

        try:
            return self.shutdown.within(share, look, longest_s=longest_s)
        except StoreFailed as error:
            self._report_once(f"the checkpoints cannot be listed: {error}")
        except GivenUp:
            self._report_once("the checkpoints cannot be listed: the storage does not answer")
        return []

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self.report(text)

    def _has(self, record: CommitRecord, newest: Snapshot) -> bool:
        """Whether the run can go on from this checkpoint without losing a step of `newest`.

        One of an older generation is behind this one, or was passed over. At the very step it may
        be either, so it is read.
        """
        if record.step < newest.info.step or record.generation >= newest.info.generation:
            return record.step >= newest.info.step
        return record.step == newest.info.step and self._is_whole(record, Share.SAVE)

    def _is_whole(self, record: CommitRecord, share: Share) -> bool:
        if record.payload not in self._loads:
            go_on = partial(self._go_on, share)
            try:
                self.shutdown.within(share, partial(check_once, self.store, record, go_on))
                self._loads[record.payload] = True
            except CheckpointDamaged:
                self._loads[record.payload] = False
            except (StoreFailed, GivenUp):
                return False
        return self._loads[record.payload]

    def _compare(self, newest: Snapshot, found: CommitRecord) -> None:
        """Look whether the committed state is the one in this memory, as the uploader would.

        The uploader itself would upload the state first, and a newer generation fences it.
        """
        if newest.info.checksum not in ("", found.checksum):
            reason = other_state_text(found)
            self.log.record(CheckpointDiffers(step=found.step, reason=reason))
            self.differences.append(reason)

    def _go_on(self, share: Share) -> None:
        if self.shutdown.is_over(share):
            raise GivenUp

    def _commit(
        self, is_over: Callable[[], bool] | None, meanwhile: Callable[[], object] = lambda: None
    ) -> "_Try":
        """Offer the newest snapshot, and wait for its result until `is_over`; None: not at all."""
        slots, newest = self.memory.slots, self.memory.newest
        if slots is None or newest is None:
            return _Try(reason="")
        with closing(UploaderClient(self.uploader_socket)) as uploader:
            # A short time where it is tried again: an uploader that died is started in between.
            within_s = FINAL_OFFER_S if is_over is None else POLL_S
            try:
                uploader.offer(slots, newest, resumed_from=None, final=True, within_s=within_s)
            except StoreFailed as error:
                return _Try(reason=str(error))
            while is_over is not None and not is_over():
                result = uploader.wait(newest.info.step, POLL_S)
                if result is None:
                    meanwhile()
                    continue
                if result.state is SaveState.DIFFERS:
                    self.differences.append(result.reason)
                return _Try(state=result.state, reason=result.reason)
        return _Try(reason="" if is_over is None else "its save had not ended")


@dataclass(frozen=True, slots=True)
class _Try:
    """Of a save. state: None where no answer came. reason: why it is not known to be committed."""

    reason: str
    state: SaveState | None = None
