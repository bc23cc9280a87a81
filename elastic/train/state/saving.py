"""A state is copied, compared and committed in this order, and what ranks disagree on is not saved.

A snapshot is a copy in the node's memory; a vote is this rank's checksum of the state, which the
others compare with theirs (agreement.py); a checkpoint is what the uploader makes of an agreed
snapshot, beside training. It does not decide when any of them is due: rank 0 does, for all ranks.

One save is under way at a time, since it keeps its slot from being written and of three slots only
one can be spared; the next one waits for its result, unless it is a final one. A failed save is
reported and never stops training; a step that was committed with another state before ends the run.
The uploader tries calls of the storage again; a final save is offered FINAL_TRIES times.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from elastic.checkpoint.record import SAVE_S, save_limit_s
from elastic.config.environment import AgentLink
from elastic.errors import EXIT_INTERRUPTED, ReplayDiffers, StoreFailed
from elastic.events import CheckpointFailed, Drained
from elastic.observe.log import EventLog
from elastic.proof.agreement import Agreement
from elastic.snapshot.image import LiveChecksum
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.system.clock import Clock
from elastic.train.loop.build import LoopParts
from elastic.train.loop.schedule import is_save_due
from elastic.train.state.flat import FlatState
from elastic.train.state.restore import ResumePoint
from elastic.train.state.snapshotting import PublishedSnapshot, layout_of
from elastic.uploader.client import Handover, offer
from elastic.uploader.protocol import SaveResult, SaveState

FINAL_TRIES = 3
# How long one call of `wait` may last: ranks that wait for the last save show progress in between.
WAIT_S = 30.0
# Until a generation that resumed from memory has saved once. It makes an interval of ten seconds,
# so that uploads do not compete with a recovery.
GUESSED_COST_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What stands beside a state, and this rank's copy of it, None where it has none."""

    info: SnapshotInfo
    published: PublishedSnapshot | None


class Saving:
    """The saves of one rank in one generation, which began with the state of `resumed`."""

    def __init__(self, parts: LoopParts, agreement: Agreement, resumed: ResumePoint) -> None:
        self.parts = parts
        self.agreement = agreement
        self.checkpointing: Checkpointing | None = None
        if parts.hands_over:
            self.checkpointing = Checkpointing(parts.link, parts.clock, parts.log, resumed)

    def keep(
        self, info: SnapshotInfo, *, copies: bool = True, wait: bool = True, patient: bool = True
    ) -> SavedState:
        """Vote for the state as it is, from a snapshot of it if there is one.

        copies: take a snapshot before. wait, patient: as in `Snapshotting.take`.
        """
        parts = self.parts
        vote: str | LiveChecksum | None = None
        began_s, published = parts.clock.monotonic(), None
        flat = parts.state.flatten()
        if parts.state.sharded is not None:  # of all rows; each part has a checksum of its own
            vote = parts.state.evidence(flat).whole
            info = replace(info, checksum=vote)
            if parts.groups.world_size > 1:  # in the next step the sums of rows are taken twice more
                began_s -= 2 * (parts.clock.monotonic() - began_s)
        spent_s = parts.clock.monotonic() - began_s
        if copies:
            published = self._take(flat, info, spent_s, wait=wait, patient=patient)
        if vote is None and published is not None:
            vote = published.snapshot.info.checksum
        elif vote is None:
            began_s, vote = parts.clock.monotonic(), LiveChecksum(layout_of(flat, info))
        self.agreement.add(info.step, vote, None if parts.state.sharded is None else flat.tensors)
        cost_s = None if copies and published is not None else parts.clock.monotonic() - began_s
        if parts.output is not None:
            comparing, step_s = parts.output.comparing, parts.output.schedule.step_s
            # Steps until the next comparison count from this one.
            comparing.begin(info.step)
            if cost_s is not None and step_s is not None:
                comparing.add_cost(cost_s, step_s)
        return SavedState(info=info, published=published)

    def _take(
        self, flat: FlatState, info: SnapshotInfo, spent_s: float, *, wait: bool, patient: bool
    ) -> PublishedSnapshot | None:
        """spent_s: what it has cost before."""
        parts = self.parts
        if parts.output is not None:
            # Steps until the next snapshot count from this one.
            parts.output.schedule.interval.begin(info.step)
        fault_point = None if parts.faults is None else partial(parts.faults.at_step(info.step), "snapshot")
        if parts.snapshotting is None:
            if fault_point is not None:  # another worker of this node copies
                fault_point()
            return None
        # An uploader that dies meanwhile gives its slot back.
        told = (lambda: None) if self.checkpointing is None else self.checkpointing.receive_result
        take = partial(parts.snapshotting.take, flat, info, meanwhile=told)
        found = take(wait=wait, patient=patient, before_publishing=fault_point)
        return self._add_cost(None if found is None else replace(found, cost_s=found.cost_s + spent_s))

    def finish_copy(self) -> None:
        """End the copy of an earlier step, if one from a GPU runs beside this step."""
        if self.parts.snapshotting is not None:
            self._add_cost(self.parts.snapshotting.finish())

    def offer(self, saved: SavedState) -> None:
        """Have it committed beside training."""
        self._agree(is_last=False)
        if self.checkpointing is not None:
            self.checkpointing.save(saved.published, saved.info.step)

    def commit(self, saved: SavedState, *, wants_digest: bool = False) -> str:
        """Commit the first or the last state of a run, and wait for it.

        wants_digest: as in `Offer`. Returns what went wrong, or nothing; the same on every rank.
        """
        self._agree(is_last=True)
        step, problem = saved.info.step, None
        for _ in range(FINAL_TRIES):
            if self.checkpointing is not None:
                self.checkpointing.save(saved.published, step, final=True, wants_digest=wants_digest)
            problem = None
            while problem is None:  # each rank shows progress
                found = None if self.checkpointing is None else self.checkpointing.wait(step)
                problem = self.parts.groups.from_rank0(found)
            if not problem:
                break
        return problem or ""

    def drain(self, saved: SavedState) -> NoReturn:
        """End this process, with its last state where others find it.

        Raises SystemExit; StoreFailed where it cannot be saved.
        """
        parts, step, problem = self.parts, saved.info.step, ""
        if commits := parts.commits_drains or self._loses_parts():
            problem = self.commit(saved)
        else:
            self._agree(is_last=True)
        if parts.output is not None:
            parts.output.log.record(Drained(step=step, committed=commits and not problem))
        if problem and parts.output is not None and not parts.commits_drains:
            print(f"step {step} is not saved: {problem}")
        elif problem and parts.commits_drains:
            raise StoreFailed(f"stopped after step {step}, which could not be saved: {problem}")
        if parts.commits_drains and parts.output is not None:  # else an agent says it
            url = parts.run_dir.url
            print(f"interrupted; step {step} is saved in {url}: the same command resumes", flush=True)
        # By this flag the agent tells a drain from an exit of the recipe's own with that code,
        # also if another node's agent asked for the drain.
        parts.page.drain = True
        raise SystemExit(EXIT_INTERRUPTED)

    def _loses_parts(self) -> bool:
        """Whether a node leaves with parts of the state."""
        if self.parts.state.sharded is None:
            return False
        return any(self.parts.groups.all_gather(self.parts.page.leaves))

    def _agree(self, *, is_last: bool) -> None:
        """Before a state becomes a checkpoint: all ranks have it, and the metrics have its step."""
        self.agreement.compare(is_last=is_last)
        if self.parts.output is not None and self.parts.metrics is not None:
            self.parts.metrics.sync()

    def _add_cost(self, published: PublishedSnapshot | None) -> PublishedSnapshot | None:
        output = self.parts.output
        if published is not None and output is not None:
            changed = output.schedule.add_cost(published.cost_s)
            if changed is not None:
                output.log.record(changed)
        return published


class Checkpointing:
    """Rank 0's end of the saves: when one is due, what the uploader has, and what became of it.

    Of a sharded state, that of the rank which publishes its node's parts.
    """

    def __init__(self, link: AgentLink, clock: Clock, log: EventLog, resumed: ResumePoint) -> None:
        self.digest = ""  # of the state whose commit was waited for last
        self._uploader, self._every = link.uploader, link.options.save_every
        self._clock, self._log = clock, log
        self._resumed_from = resumed.step if resumed.source == "checkpoint" else None
        # What a save is taken to cost training. A run that goes on from memory has time for its
        # first one. A young run has no checkpoint yet: None has it save at its first step.
        self._cost_s = GUESSED_COST_S if resumed.source in ("snapshot", "peer") else None
        self._last_s = clock.monotonic()
        self._under_way: Handover | None = None
        self._slots: SnapshotSlots | None = None  # in which that snapshot lies
        self._answer_by = 0.0  # a wait for the save under way gives up then
        self._is_overdue = False
        self._refusal = ""  # why the last save could not be handed to the uploader

    @property
    def is_busy(self) -> bool:
        """Whether the uploader is to be asked what became of a save."""
        return self._under_way is not None

    def is_due(self, step: int) -> bool:
        self.receive_result()
        since_s = self._clock.monotonic() - self._last_s
        self._is_overdue |= is_save_due(self._every, step=step, since_s=since_s, cost_s=self._cost_s)
        return self._is_overdue and self._under_way is None

    def save(
        self,
        published: PublishedSnapshot | None,
        step: int,
        *,
        final: bool = False,
        wants_digest: bool = False,
    ) -> None:
        """Offer a snapshot to the uploader.

        published: None when there was no memory for a snapshot. final: training waits for it.
        wants_digest: as in `Offer`.
        """
        self.receive_result()
        self._last_s, self._is_overdue = self._clock.monotonic(), False
        try:
            if published is None:
                raise StoreFailed("there is no memory for a copy of the state")
            handover = offer(
                self._uploader,
                published.slots,
                published.snapshot,
                resumed_from=self._resumed_from,
                final=final,
                wants_digest=wants_digest,
            )
            if self._under_way is not None:  # the uploader, which goes on with it, records its end
                self._under_way.close()
            self._under_way, self._refusal, self._slots = handover, "", published.slots
            # A save may wait for another one of the same size.
            limit_s = 2 * save_limit_s(SAVE_S, published.snapshot.size_bytes) + WAIT_S
            self._answer_by = self._clock.monotonic() + limit_s
        except (OSError, StoreFailed) as error:
            if not self._refusal:  # said once, until a save is handed over
                print(f"checkpoint step={step} is not saved: {error}; training goes on")
            self._refusal = str(error)
            self._log.record(CheckpointFailed(step=step, reason=self._refusal))
        snapshot_s = 0.0 if published is None else published.cost_s
        self._cost_s = snapshot_s + self._clock.monotonic() - self._last_s

    def wait(self, step: int) -> str | None:
        """Wait for the save of `step`, the last call of `save`.

        Returns what went wrong, "" when it is committed, and None after WAIT_S while it goes on.
        Raises ReplayDiffers, as `is_due` and `save`.
        """
        if self._under_way is None or self._under_way.step != step:
            return self._refusal  # the uploader never had it
        result = self._under_way.wait(WAIT_S)
        if result is None and self._clock.monotonic() < self._answer_by:
            return None
        self._under_way.close()
        self._under_way = None
        if result is None:
            return "the uploader has not answered in time"
        self._take_up(result)
        if result.state is not SaveState.COMMITTED:
            return result.reason
        self.digest = result.digest
        return ""

    def receive_result(self) -> None:
        if self._under_way is None or (result := self._under_way.wait(0.0)) is None:
            return
        self._under_way = None
        self._take_up(result)
        if result.state in (SaveState.FAILED, SaveState.LOST):
            print(f"checkpoint step={result.step} failed: {result.reason}; training goes on")
        elif self._cost_s is not None:
            # If all processors of a machine are busy, training loses the uploader's seconds on
            # one of them.
            self._cost_s += result.cpu_s / (os.cpu_count() or 1)

    def _take_up(self, result: SaveResult) -> None:
        """Raises ReplayDiffers for a step that was committed before with another state."""
        if result.state is SaveState.DIFFERS:
            raise ReplayDiffers(result.reason)
        if result.state is SaveState.LOST:  # the uploader, which records other failures, died with it
            self._log.record(CheckpointFailed(step=result.step, reason=result.reason))
            if self._slots is not None:  # where there is no agent that would
                self._slots.release_all()
        self._slots = None
