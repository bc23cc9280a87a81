"""Before a node leaves, the newest state in its memory is committed, within the grace period.

The node commits it itself, or sees that another one has, with the same state. A drain leaves the
state of its last step in the memory of every node, not in a checkpoint: the workers need not wait
for an upload, and most drains lead to a generation that has the state in memory. But the memory of
a node that leaves is lost with it, and exit code 75 promises that no step is lost.

A checkpoint that the run has passed over, because it is damaged, does not count: training fell back
behind it. It does not promise that the storage accepts the checkpoint. The exit code follows from
`newest_checkpoint` (exit_report.py).
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from elastic.agent.settings import Settings
from elastic.agent.shutdown_request import GivenUp, ShutdownRequest
from elastic.agent.snapshot_memory import SnapshotMemory
from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.commit import other_state_text
from elastic.checkpoint.record import CommitRecord
from elastic.errors import StoreFailed
from elastic.events import CheckpointDiffers
from elastic.observe.log import EventLog
from elastic.snapshot.slots import Snapshot
from elastic.storage.remote import open_store
from elastic.storage.store import READ_LIMIT_S
from elastic.system.clock import Clock
from elastic.system.leave_deadline import Share
from elastic.uploader.client import Handover, UploaderProcess, offer
from elastic.uploader.protocol import SaveResult, SaveState

POLL_S = 0.1
LOOK_SHARE = 0.25  # of the time that is left for a save: how long to look whether it is needed
RETRY_S, LONGEST_RETRY_S = 0.5, 2.0  # pauses between the tries of a save


@dataclass(slots=True, kw_only=True)
class FinalCheckpoint:
    """report: takes lines for the console. log: of the agent. differences: why a state is not
    saved, where its step was committed before with another.
    """

    memory: SnapshotMemory
    settings: Settings
    uploader: UploaderProcess
    shutdown: ShutdownRequest
    log: EventLog
    report: Callable[[str], None]
    clock: Clock
    differences: list[str] = field(default_factory=list)
    said: set[str] = field(default_factory=set)  # why the checkpoints could not be listed

    def newest_checkpoint(self, *, step: int, generation: int, is_new: bool = False) -> CommitRecord | None:
        """None where the storage holds no checkpoint of this run, or does not answer.

        step: the last that was trained, in this generation; 0 where this node does not know it.
        is_new: it was trained, and not only restored: then a checkpoint of it from an older
        generation was passed over by the run, unless a save of this node has found it whole.
        The storage is asked, and not the event log: an uploader may die after its commit and before
        it records the event.
        """

        def counts(record: CommitRecord) -> bool:
            if not step or record.step < step or record.generation >= generation:
                return True
            return record.step == step and (not is_new or step == self.shutdown.saved_step)

        found = self._records(Share.REPORT, READ_LIMIT_S, step=step)
        return max(filter(counts, found), key=lambda record: record.step, default=None)

    def offer_newest(self) -> None:
        """Have the uploader commit the newest snapshot; does not wait for the result."""
        if (newest := self.memory.newest) is not None:
            try:
                self._offer(newest).close()
            except StoreFailed as error:
                self.report(f"the newest state is not saved: {error}")

    def ensure_committed(self, *, others: bool, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Return once a checkpoint holds the newest step in memory, or the time for it is over.

        A save that fails is tried again: the uploader may have been killed, or the disk full for a
        moment.

        others: other nodes go on with the same state. They are given half of the time to commit it:
        the node of their rank 0 offers it to its uploader as soon as their next generation starts,
        and a second upload of the same bytes would only compete with theirs. Where their generation
        fences the save of this node, they are given the rest. meanwhile: called several times a
        second.
        """
        newest, began_s = self.memory.newest, self.clock.monotonic()
        if newest is None:
            return
        step, pause_s = newest.info.step, RETRY_S

        def end_s() -> float:
            return self.shutdown.end_s(Share.SAVE, began_s, self.shutdown.grace_s)

        def is_over() -> bool:
            return self.clock.monotonic() >= end_s()

        next_try_s = (began_s + end_s()) / 2 if others else began_s
        last: SaveResult | None = None
        # A store that does not answer this may still take a save.
        while not self._is_saved_by_others(newest, (end_s() - self.clock.monotonic()) * LOOK_SHARE):
            is_fenced = last is not None and last.state is SaveState.FENCED
            if last is not None and (is_over() or (is_fenced and not others)):
                self.report(f"checkpoint step={step} is not saved: {last.reason}")
                return
            # One try is made also where no time is left: a save that is handed over may still end.
            if not is_fenced and (is_over() or self.clock.monotonic() >= next_try_s):
                is_first, last = last is None, self._save(newest, is_over, meanwhile)
                if last.state is SaveState.COMMITTED:
                    self.shutdown.saved(step)
                    return
                if last.state is SaveState.DIFFERS:
                    self.differences.append(last.reason)
                    return
                if is_first and not is_over() and last.state is not SaveState.FENCED:
                    self.report(f"checkpoint step={step} is not saved yet, and is tried again: {last.reason}")
                next_try_s, pause_s = self.clock.monotonic() + pause_s, min(2 * pause_s, LONGEST_RETRY_S)
            meanwhile()
            self.clock.sleep(POLL_S)
        if not self.differences:
            self.shutdown.saved(step)

    def finish_saves(self) -> None:
        """Stop the uploader once it has finished its saves, or has had the time that they take."""
        slots, began_s = self.memory.slots, self.clock.monotonic()
        self.uploader.finish(
            lambda line: None if self.shutdown.reason else self.report(line),
            ended_by="SIGTERM or Ctrl-C shortens that to --grace",
            size_bytes=0 if slots is None else slots.capacity_bytes,
            is_over=lambda: self.clock.monotonic() >= self.shutdown.end_s(Share.SAVE, began_s),
        )

    def _is_saved_by_others(self, newest: Snapshot, longest_s: float) -> bool:
        """Whether the run can go on from a checkpoint without losing a step of `newest`.

        A checkpoint of an older generation is behind this one, or was passed over. One of the very
        step is compared by the checksum of its image: the uploader, which would say the same, would
        upload the state first, and a newer generation fences it.
        """
        info = newest.info
        found = [
            each
            for each in self._records(Share.SAVE, longest_s)
            if each.step >= info.step and each.generation >= info.generation
        ]
        # Retention may have deleted the step for a newer one: then there is nothing to compare.
        same = next((each for each in found if each.step == info.step), None)
        if same is not None and info.checksum not in ("", same.checksum):
            reason = other_state_text(same)
            self.log.record(CheckpointDiffers(step=info.step, reason=reason))
            self.differences.append(reason)
        return bool(found)

    def _records(self, share: Share, longest_s: float, *, step: int = 0) -> list[CommitRecord]:
        """step: asked for by name where the listing, which may be old, has none as new as it."""
        until_s = self.shutdown.end_s(share, self.clock.monotonic(), longest_s)

        store, run_id = open_store(self.settings.run.checkpoints_url), self.settings.run_id
        look = partial(list_commits, store, self.clock, run_id=run_id, known_step=step, until_s=until_s)
        try:
            return self.shutdown.within(share, look, longest_s=longest_s)[0]
        except StoreFailed as error:
            problem = str(error)
        except GivenUp:
            problem = "the storage does not answer"
        if problem not in self.said:
            self.said.add(problem)
            self.report(f"the checkpoints cannot be listed: {problem}")
        return []

    def _save(
        self, newest: Snapshot, is_over: Callable[[], bool], meanwhile: Callable[[], object]
    ) -> SaveResult:
        """Offer the newest snapshot, and wait for its result until `is_over`."""
        step, problem = newest.info.step, "its save had not ended"
        try:
            with closing(self._offer(newest)) as handover:
                while not is_over():
                    if (result := handover.wait(POLL_S)) is not None:
                        return result
                    meanwhile()
        except StoreFailed as error:
            problem = str(error)
        return SaveResult(step=step, state=SaveState.FAILED, reason=problem)

    def _offer(self, newest: Snapshot) -> Handover:
        """Raises StoreFailed after a short time: this agent must start an uploader that died."""
        path, slots = self.uploader.socket_path, self.memory.slots
        assert slots is not None, "a snapshot lies in a slot"
        return offer(path, slots, newest, resumed_from=None, final=True)
