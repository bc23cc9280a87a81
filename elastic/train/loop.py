"""A recipe sees one step after another; resumes, snapshots, saves and drains are hidden.

After each step every rank knows the same: the loss, and whether to take a snapshot, to save, to
drain. A step leaves behind, in this order: its line in the metrics, its snapshot, its number on the
control page, the offer to the uploader. A drain ends the process with the interrupted exit code
once the state of its last step is in the agent's memory. It does not commit that state: the agent
does, if the run ends there.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.config.environment import AgentLink
from elastic.data.loader import Batch, Loader
from elastic.errors import EXIT_INTERRUPTED, StoreFailed, UsageError
from elastic.events import Drained, FirstStep, Restored, RunStarted, SnapshotInterval
from elastic.faults.inject import WorkerFaults
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.control_page import ControlPage
from elastic.system.phase import Phase
from elastic.train.buffers import Buffers
from elastic.train.checkpointing import Checkpointing
from elastic.train.consistency import check_same_snapshots
from elastic.train.process_groups import ProcessGroups
from elastic.train.restore import LocalSnapshot, Restorer, ResumePoint
from elastic.train.schedule import SnapshotSchedule
from elastic.train.snapshotting import PublishedSnapshot, Snapshotting, StepRecord
from elastic.train.state import State
from elastic.train.step import Requests, Step, StepOutcome, StepParts
from elastic.worker.heartbeat import HeartbeatSender

FINAL_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank0Output:
    """What rank 0 alone writes, and decides for all ranks."""

    log: EventLog
    metrics: Metrics
    checkpointing: Checkpointing
    schedule: SnapshotSchedule

    def write_step(self, line: StepLine, *, is_new: bool) -> None:
        self.metrics.append(line)
        assert line.seconds is not None, "the loop measures each step"
        self.schedule.add_step(line.seconds)
        if is_new:
            self.log.record(FirstStep(step=line.step))

    def add_snapshot_cost(self, cost_s: float) -> None:
        schedule = self.schedule
        if schedule.add_cost(cost_s) and schedule.interval is not None:
            every, median_s, step_s = schedule.interval, schedule.cost_s, schedule.step_s
            self.log.record(SnapshotInterval(every=every, cost_s=median_s, step_s=step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop is made of in one generation.

    output: on rank 0 alone. metrics_copy: kept where nodes share no folder, by each other node.
    snapshotting: on one worker of each node. faults: None without a plan. commits_drains: there is
    no agent that would.
    """

    groups: ProcessGroups
    link: AgentLink
    run_id: str
    store: Store
    clock: Clock
    page: ControlPage
    heartbeat: HeartbeatSender
    local_snapshot: LocalSnapshot
    output: Rank0Output | None
    metrics_copy: Metrics | None
    snapshotting: Snapshotting | None
    faults: WorkerFaults | None
    commits_drains: bool


class Loop:
    def __init__(self, parts: LoopParts, loader: Loader, state: State) -> None:
        groups = parts.groups
        self._parts = parts
        self._order = loader.order
        self._loader = loader
        self._state = state
        self._exchange = Exchange(
            shards=self._order.shards, world_size=groups.world_size, rank=groups.rank, group=groups.gradients
        )
        self._chain = ""
        self._started_at = 0.0
        self._first_new = 0  # the first step that no generation has trained before; rank 0 knows it
        self._last: tuple[StepRecord, PublishedSnapshot | None] | None = None
        self.digest = ""  # of the checkpoint of the last step, once it is committed

    def run(self) -> Iterator[Step]:
        """The steps that are left.

        Raises SystemExit at a drain; StoreFailed when the last state cannot be saved.
        """
        parts = self._parts
        resumed = self._resume()
        gradients = Gradients(self._state.trained, self._exchange)
        step_parts = StepParts(
            exchange=self._exchange,
            gradients=gradients,
            buffers=Buffers(self._state.modules, self._order.shards, parts.groups.device),
            device=parts.groups.device,
            heartbeat=parts.heartbeat,
            seed=self._order.seed,
            steps=self._order.steps,
            global_batch=self._order.global_batch,
        )
        batches = self._loader.steps(self._exchange.leaves, resumed.step + 1)
        self._started_at = parts.clock.monotonic()
        for number in range(resumed.step + 1, self._order.steps + 1):
            step = self._step(number, step_parts, next(batches))
            if parts.snapshotting is not None:
                parts.snapshotting.before_forward()
            # Until its first sum the step is the recipe's own code, which may evaluate a model
            # there.
            parts.heartbeat.enter(Phase.BETWEEN)
            yield step
            self._finish(step)
        gradients.close()
        if resumed.source != "checkpoint" or resumed.step < self._order.steps:
            self._commit_last(resumed)
        parts.heartbeat.enter(Phase.AFTER)

    def _resume(self) -> ResumePoint:
        parts, output, order = self._parts, self._parts.output, self._order
        began_at = parts.clock.monotonic()
        if output is not None:
            sizes = {"global_batch": order.global_batch, "shards": order.shards}
            output.log.record(RunStarted(steps=order.steps, epochs=order.epochs, seed=order.seed, **sizes))
        resumed = Restorer(
            groups=parts.groups,
            store=parts.store,
            local=parts.local_snapshot,
            state=self._state,
            run_id=parts.run_id,
            failures=parts.link.failures,
            log=None if output is None else output.log,
            clock=parts.clock,
            faults=parts.faults,
        ).restore()
        self._chain = resumed.chain
        parts.page.set_step(parts.groups.local_rank, resumed.step)
        if parts.metrics_copy is not None:
            _rewind(parts.metrics_copy, resumed)
        if output is not None:
            output.checkpointing.resume(
                from_memory=resumed.source in ("snapshot", "peer"),
                resumed_from=resumed.step if resumed.source == "checkpoint" else None,
            )
            self._first_new = max(resumed.step, _rewind(output.metrics, resumed)) + 1
            lost_steps, seconds = self._first_new - 1 - resumed.step, parts.clock.monotonic() - began_at
            output.log.record(
                Restored(step=resumed.step, source=resumed.source, lost_steps=lost_steps, seconds=seconds)
            )
        return resumed

    def _step(self, number: int, step_parts: StepParts, batches: list[Batch]) -> Step:
        epoch, _ = self._order.position(number)
        step = Step(number, epoch, step_parts, batches, lambda: self._requests(number))
        if self._parts.faults is not None:
            step.fault_point = self._parts.faults.at_step(number)
        return step

    def _requests(self, number: int) -> Requests:
        output = self._parts.output
        if self._parts.snapshotting is not None:
            self._parts.snapshotting.before_update()
        is_last = number == self._order.steps
        return Requests(
            drain=self._parts.page.drain,
            snapshot=output is not None and not is_last and output.schedule.is_due(number),
            save=output is not None and not is_last and output.checkpointing.is_due(number),
        )

    def _finish(self, step: Step) -> None:
        """After the recipe's optimizer: leave behind what the step leaves behind, in order."""
        parts, outcome = self._parts, step.outcome
        if outcome is None:
            raise UsageError(
                f"step {step.number} ended without gradients: expected step.backward(loss) or step.mean_loss(...) in the body of the loop"
            )
        step.fault_point("optimizer")
        if parts.snapshotting is not None:
            # Of an earlier step, if its copy from the GPU ran beside this one.
            self._add_cost(parts.snapshotting.finish())
        record = self._record(step, outcome)
        is_last = step.number == self._order.steps
        published = None
        if outcome.snapshot or outcome.save or outcome.drain or is_last:
            parts.heartbeat.enter(Phase.SAVE)
            ends = outcome.drain or is_last
            published = self._take_snapshot(record, wait=ends or outcome.save, patient=ends)
            step.fault_point("after-snapshot")
        parts.page.set_step(parts.groups.local_rank, step.number)
        if is_last:
            self._last = record, published
        elif outcome.drain:
            self._drain(record, published)
        elif outcome.save:
            self._save(record, published, final=False)
        parts.heartbeat.finish_step()
        parts.heartbeat.enter(Phase.BETWEEN)

    def _record(self, step: Step, outcome: StepOutcome) -> StepRecord:
        """Write the step's line into the metrics."""
        parts = self._parts
        self._chain = _next_chain(self._chain, outcome)
        line = StepLine(
            step=step.number,
            epoch=step.epoch,
            loss=outcome.loss,
            chain=self._chain[:16],
            world_size=parts.groups.world_size,
            generation=parts.link.generation,
            time=parts.clock.wall(),
            seconds=parts.clock.monotonic() - self._started_at,
            values=step.logged,
        )
        record = StepRecord(step=step.number, epoch=step.epoch, chain=self._chain, line=line)
        if parts.output is not None:
            parts.output.write_step(line, is_new=step.number == self._first_new)
        if parts.metrics_copy is not None:
            parts.metrics_copy.append(line)
        self._started_at = parts.clock.monotonic()
        return record

    def _take_snapshot(self, record: StepRecord, *, wait: bool, patient: bool) -> PublishedSnapshot | None:
        parts = self._parts
        if parts.output is not None:
            parts.output.schedule.requested(record.step)
        halfway = None if parts.faults is None else parts.faults.in_snapshot(record.step)
        if parts.snapshotting is None:
            if halfway is not None:  # another worker of this node copies
                halfway()
            return None
        return self._add_cost(
            parts.snapshotting.take(
                self._state.flatten(),
                record,
                late=self._state.updated_addresses,
                wait=wait,
                patient=patient,
                halfway=halfway,
            )
        )

    def _add_cost(self, published: PublishedSnapshot | None) -> PublishedSnapshot | None:
        if published is not None and self._parts.output is not None:
            self._parts.output.add_snapshot_cost(published.cost_s)
        return published

    def _save(self, record: StepRecord, published: PublishedSnapshot | None, *, final: bool) -> None:
        began_at = self._parts.clock.monotonic()
        self._check_same(record, published)
        output = self._parts.output
        if output is not None:
            # A step whose checkpoint exists must not be missing in the metrics.
            output.metrics.sync()
            output.checkpointing.save(published, record.step, began_at=began_at, final=final)

    def _check_same(self, record: StepRecord, published: PublishedSnapshot | None) -> None:
        checksum = None if published is None else published.snapshot.info.checksum
        check_same_snapshots(self._parts.groups, checksum, self._state.flatten, f"after step {record.step}")

    def _drain(self, record: StepRecord, published: PublishedSnapshot | None) -> None:
        parts, problem = self._parts, ""
        if parts.commits_drains:
            problem = self._save_and_wait(record, published)
        else:
            self._check_same(record, published)
            if parts.output is not None:
                parts.output.metrics.sync()
        if parts.output is not None:
            committed = parts.commits_drains and not problem
            parts.output.log.record(Drained(step=record.step, committed=committed))
        if problem:
            raise StoreFailed(f"stopped after step {record.step}, which could not be saved: {problem}")
        raise SystemExit(EXIT_INTERRUPTED)

    def _save_and_wait(self, record: StepRecord, published: PublishedSnapshot | None) -> str:
        """Save a state after which no other follows, and wait until it is committed.

        Returns what went wrong, or nothing; the same on every rank.
        """
        output, problem = self._parts.output, ""
        for _ in range(FINAL_TRIES):
            self._save(record, published, final=True)
            found = "" if output is None else output.checkpointing.wait(record.step)
            problem = self._parts.groups.from_rank0(found)
            if not problem:
                break
        return problem

    def _commit_last(self, resumed: ResumePoint) -> None:
        """Save the state of the last step, which this generation trained or found in memory."""
        parts = self._parts
        parts.heartbeat.enter(Phase.SAVE)
        if self._last is None:
            assert resumed.step == self._order.steps
            last_epoch, _ = self._order.position(resumed.step)
            record = StepRecord(step=resumed.step, epoch=last_epoch, chain=resumed.chain, line=resumed.line)
            self._last = record, self._take_snapshot(record, wait=True, patient=True)
        record, published = self._last
        problem = self._save_and_wait(record, published)
        if problem:
            raise StoreFailed(f"trained to the last step, {record.step}, which could not be saved: {problem}")
        if parts.output is not None:
            self.digest = parts.output.checkpointing.digest


def _rewind(metrics: Metrics, resumed: ResumePoint) -> int:
    """Cut the metrics back to the resumed step; returns the highest step that they had."""
    written = metrics.rewind(resumed.step)
    if resumed.line is not None and written == resumed.step - 1:
        # Rank 0 died between this step's sums and its line. Another node's snapshot has the line.
        metrics.append(resumed.line)
    return written


def _next_chain(chain: str, outcome: StepOutcome) -> str:
    """sha256 over the chain so far, the loss and the gradient norms, as bits."""
    # All NaNs become one: which of two NaNs an addition passes on depends on their order.
    numbers = [
        math.nan if math.isnan(number) else number for number in (outcome.loss, *outcome.gradient_norms)
    ]
    return hashlib.sha256(bytes.fromhex(chain) + struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()
