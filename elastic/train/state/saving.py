"""A state is copied, compared and committed in this order, and what ranks disagree on is not saved.

A snapshot is a copy in the node's memory; a vote is this rank's checksum of the state, which the
others compare with theirs (agreement.py); a checkpoint is what the uploader makes of an agreed
snapshot. It does not decide when any of them is due: rank 0 does, for all ranks.
"""

from dataclasses import dataclass
from typing import NoReturn

from elastic.errors import EXIT_INTERRUPTED, StoreFailed
from elastic.events import Drained
from elastic.proof.agreement import Agreement
from elastic.snapshot.image import LiveChecksum
from elastic.snapshot.slots import SnapshotInfo
from elastic.train.loop.build import LoopParts
from elastic.train.state.snapshotting import PublishedSnapshot, layout_of

FINAL_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What stands beside a state, and this rank's copy of it, None where it has none."""

    info: SnapshotInfo
    published: PublishedSnapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The saves of one rank in one generation."""

    parts: LoopParts
    agreement: Agreement

    def take(self, info: SnapshotInfo, *, wait: bool, patient: bool) -> PublishedSnapshot | None:
        """A snapshot of the state as it is; wait and patient: as in `Snapshotting.take`."""
        parts = self.parts
        if parts.output is not None:
            parts.output.schedule.requested(info.step)
        halfway = None if parts.faults is None else parts.faults.in_snapshot(info.step)
        if parts.snapshotting is None:
            if halfway is not None:  # another worker of this node copies
                halfway()
            return None
        return self._add_cost(
            parts.snapshotting.take(
                parts.state.flatten(),
                info,
                late=parts.state.updated_addresses,
                wait=wait,
                patient=patient,
                halfway=halfway,
            )
        )

    def after_update(self) -> None:
        """Finish an earlier step's copy, and see to memory."""
        self.finish_copy()
        if self.parts.snapshotting is not None:
            self.parts.snapshotting.follow_memory(self.parts.state.flatten)

    def finish_copy(self) -> None:
        """Of an earlier step, if one from a GPU runs beside this step."""
        if self.parts.snapshotting is not None:
            self._add_cost(self.parts.snapshotting.finish())

    def vote(self, info: SnapshotInfo, published: PublishedSnapshot | None) -> None:
        """Have this rank's state compared with the others', from its copy if there is one."""
        parts, began_s, cost_s = self.parts, self.parts.clock.monotonic(), None
        if published is not None:
            self.agreement.add(info.step, published.snapshot.info.checksum)
        else:
            self.agreement.add(info.step, LiveChecksum(layout_of(parts.state.flatten(), info)))
            cost_s = parts.clock.monotonic() - began_s
        if parts.output is not None:
            comparing, step_s = parts.output.comparing, parts.output.schedule.step_s
            comparing.begin(info.step)
            if cost_s is not None and step_s is not None:
                comparing.add_cost(cost_s, step_s)

    def begin(self, info: SnapshotInfo) -> SavedState:
        """Copy and vote for a state that is to be committed without a step before that."""
        published = self.take(info, wait=True, patient=True)
        self.vote(info, published)
        return SavedState(info=info, published=published)

    def offer(self, saved: SavedState) -> None:
        """Have it committed beside training."""
        began_s = self.parts.clock.monotonic()
        self._agree(is_last=False)
        if self.parts.output is not None:
            self.parts.output.checkpointing.save(saved.published, saved.info.step, began_s=began_s)

    def commit(self, saved: SavedState, tries: int = FINAL_TRIES) -> str:
        """Commit a state before which or after which there is no other; wait for it.

        Returns what went wrong, or nothing; the same on every rank.
        """
        self._agree(is_last=True)
        output, problem = self.parts.output, ""
        for _ in range(tries):
            if output is not None:
                began_s = self.parts.clock.monotonic()
                output.checkpointing.save(saved.published, saved.info.step, began_s=began_s, final=True)
            problem = self._wait(saved.info.step)
            if not problem:
                break
        return problem

    def _wait(self, step: int) -> str:
        """What went wrong with the save of `step`, on every rank, each of which shows progress."""
        while True:
            found = None if self.parts.output is None else self.parts.output.checkpointing.wait(step)
            problem = self.parts.groups.from_rank0(found)
            if problem is not None:
                return problem

    def drain(self, saved: SavedState) -> NoReturn:
        """End this process, with its last state where others find it.

        Raises SystemExit; StoreFailed where it cannot be saved.
        """
        parts, step, problem = self.parts, saved.info.step, ""
        if parts.commits_drains:
            problem = self.commit(saved)
        else:
            self._agree(is_last=True)
        if parts.output is not None:
            parts.output.log.record(Drained(step=step, committed=parts.commits_drains and not problem))
        if problem:
            raise StoreFailed(f"stopped after step {step}, which could not be saved: {problem}")
        if parts.commits_drains and parts.output is not None:  # else an agent says it
            print(
                f"interrupted; step {step} is saved in {parts.restorer.run_url}: the same command resumes",
                flush=True,
            )
        # The agent tells this exit from one that is the recipe's own by it, also if another node's
        # agent asked for the drain.
        parts.page.drain = True
        raise SystemExit(EXIT_INTERRUPTED)

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
