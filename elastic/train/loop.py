"""The loop hides resume, snapshots, saves and drains behind an iterator: the recipe sees one step after another and nothing else.

After each step every rank knows the same: the loss, whether to keep the state, whether to save it, whether to stop. What a step leaves behind, in this order: its line in the
metrics, the snapshot, its number on the control page, the offer to the uploader. A drain ends the process with the interrupted exit code once the state of its last step
is in the agent's memory; committing it, where the run ends with it, is the agent's business.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic.data.loader import Batch, Loader
from elastic.data.order import Order
from elastic.errors import EXIT_INTERRUPTED, StoreFailed, UsageError
from elastic.events import Drained, FirstStep, Restored, RunStarted, SnapshotInterval
from elastic.faults.inject import WorkerFaults
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
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
from elastic.train.restore import LocalSnapshot, ResumePoint, restore
from elastic.train.snapshot_policy import SnapshotSchedule
from elastic.train.snapshotting import PublishedSnapshot, Snapshotting, StepRecord
from elastic.train.state import State
from elastic.train.step import Requests, Shards, Step, StepOutcome
from elastic.train.to_device import on_device
from elastic.worker.heartbeat import HeartbeatSender

FINAL_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank0Output:
    """What rank 0 alone writes."""

    log: EventLog
    metrics: Metrics
    saving: Checkpointing
    interval: SnapshotSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop stands in.

    `diary` is None on every rank but the first, `snapshots` on every worker of a node but one, `faults` without a plan. `failures`: consecutive ones without a new step that may lie in the state.
    """

    world: ProcessGroups
    run_id: str
    store: Store
    clock: Clock
    generation: int
    failures: int
    commits_drains: bool  # there is no agent that would
    diary: Rank0Output | None
    copy: Metrics | None  # of the metrics, kept by a node that is not the one of rank 0
    page: ControlPage
    pulse: HeartbeatSender
    kept: LocalSnapshot
    snapshots: Snapshotting | None
    faults: WorkerFaults | None


class Loop:
    def __init__(self, around: LoopParts, order: Order, loader: Loader, state: State) -> None:
        world = around.world
        self._around = around
        self._order = order
        self._loader = loader
        self._state = state
        self._exchange = Exchange(
            shards=order.shards, world_size=world.size, rank=world.rank, group=world.group
        )
        self._chain = ""
        self._started_at = 0.0
        self._first_new = 0  # the first step that no generation has trained before; rank 0 knows it
        self._final: tuple[StepRecord, PublishedSnapshot | None] | None = None
        self.digest = ""  # of the checkpoint of the last step, once it is committed

    def run(self) -> Iterator[Step]:
        """The steps that are left. Raises SystemExit at a drain; StoreFailed when the last state cannot be saved."""
        loaded = self._begin()
        gradients = Gradients(self._state.trained, self._exchange)
        shards = Shards(
            exchange=self._exchange,
            gradients=gradients,
            buffers=Buffers(self._state.modules, self._order.shards, self._around.world.device),
            device=self._around.world.device,
            seed=self._order.seed,
            pulse=self._around.pulse,
        )
        batches = self._loader.load(self._exchange.leaves, loaded.step + 1)
        self._started_at = self._around.clock.monotonic()
        for number in range(loaded.step + 1, self._order.steps + 1):
            step = self._step(number, shards, batches)
            if self._around.snapshots is not None:
                self._around.snapshots.before_forward()
            # Until the first sum it is the recipe's own code, which may evaluate there; the step says when it begins.
            self._around.pulse.enter(Phase.BETWEEN)
            yield step
            self._finish(step)
        gradients.close()
        if loaded.source != "checkpoint" or loaded.step < self._order.steps:
            self._end(loaded)
        self._around.pulse.enter(Phase.AFTER)

    def _begin(self) -> ResumePoint:
        around, diary, order = self._around, self._around.diary, self._order
        began_at = around.clock.monotonic()
        if diary is not None:
            about = {"steps": order.steps, "epochs": order.epochs, "seed": order.seed}
            diary.log.record(RunStarted(**about, global_batch=order.global_batch, shards=order.shards))
        loaded = restore(
            around.world,
            around.store,
            around.kept,
            self._state,
            run_id=around.run_id,
            failures=around.failures,
            log=diary.log if diary is not None else None,
            clock=around.clock,
            reached=around.faults.at_restore if around.faults is not None else None,
        )
        self._chain = loaded.chain
        around.page.set_step(around.world.local_rank, loaded.step)
        if around.copy is not None:
            self._rewind(around.copy, loaded)
        if diary is not None:
            lost = self._take_up(diary, loaded)
            seconds = around.clock.monotonic() - began_at
            diary.log.record(
                Restored(step=loaded.step, source=loaded.source, lost_steps=lost, seconds=seconds)
            )
        return loaded

    def _take_up(self, diary: Rank0Output, loaded: ResumePoint) -> int:
        """Make the metrics those of the steps up to the loaded one; returns how many were done that will be done again."""
        diary.saving.resume(
            has_checkpoint=loaded.source in ("snapshot", "peer"),
            resumed_from=loaded.step if loaded.source == "checkpoint" else None,
        )
        written = self._rewind(diary.metrics, loaded)
        self._first_new = max(loaded.step, written) + 1
        return self._first_new - 1 - loaded.step

    def _rewind(self, metrics: Metrics, loaded: ResumePoint) -> int:
        """Returns the highest step that was written there before."""
        written = metrics.rewind(loaded.step)
        if loaded.line is not None and written == loaded.step - 1:
            # Rank 0 died between this step's sums and its line; the snapshot of another node has it.
            metrics.append(loaded.line)
        return written

    def _step(self, number: int, shards: Shards, batches: Iterator[Batch]) -> Step:
        own: list[Batch] = []
        for _ in self._exchange.leaves:
            batch = next(batches)
            batch.data = on_device(batch.data, shards.device)
            own.append(batch)
        step = Step(
            number=number,
            steps=self._order.steps,
            epoch=self._order.place(number)[0],
            shards=shards,
            batches=own,
            requests=lambda: self._requests(number),
            global_batch=self._order.global_batch,
        )
        if self._around.faults is not None:
            step.reached = self._around.faults.at_step(number)
        return step

    def _requests(self, number: int) -> Requests:
        diary = self._around.diary
        if self._around.snapshots is not None:
            self._around.snapshots.before_update()
        is_last = number == self._order.steps
        save = diary is not None and not is_last and diary.saving.is_due(number)
        keep = diary is not None and not is_last and diary.interval.is_due(number)
        return Requests(drain=self._around.page.drain, keep=keep, save=save)

    def _finish(self, step: Step) -> None:
        around, outcome = self._around, step.outcome
        if outcome is None:
            raise UsageError(
                f"step {step.number} ended without gradients: expected step.backward(loss) or step.mean_loss(...) in the body of the loop"
            )
        step.reached("optimizer")
        # Of an earlier step, where it was copied beside this one.
        self._finish_snapshot()
        self._chain = _link(self._chain, outcome)
        point = StepRecord(
            step=step.number, epoch=step.epoch, chain=self._chain, line=self._line(step, outcome)
        )
        if around.diary is not None:
            self._write_down(around.diary, point)
        if around.copy is not None:
            around.copy.append(point.line)
        self._started_at = around.clock.monotonic()
        is_last = step.number == self._order.steps
        taken = None
        if outcome.keep or outcome.save or outcome.drain or is_last:
            around.pulse.enter(Phase.SAVE)
            must = outcome.drain or is_last
            taken = self._keep(point, now=must or outcome.save, patient=must)
            step.reached("after-snapshot")
        around.page.set_step(around.world.local_rank, step.number)
        if is_last:
            self._final = point, taken
        elif outcome.drain:
            self._drain(point, taken)
        elif outcome.save:
            self._save(taken, point, final=False)
        around.pulse.finish_step()
        around.pulse.enter(Phase.BETWEEN)

    def _line(self, step: Step, outcome: StepOutcome) -> dict[str, Any]:
        seconds = self._around.clock.monotonic() - self._started_at
        return step.logged | {
            "step": step.number,
            "epoch": step.epoch,
            "loss": outcome.loss,
            "chain": self._chain[:16],
            "world_size": self._around.world.size,
            "generation": self._around.generation,
            "time": self._around.clock.wall(),
            "seconds": seconds,
        }

    def _write_down(self, diary: Rank0Output, point: StepRecord) -> None:
        diary.metrics.append(point.line)
        diary.interval.took_step(point.line["seconds"])
        if point.step == self._first_new:
            diary.log.record(FirstStep(step=point.step))

    def _keep(self, point: StepRecord, *, now: bool, patient: bool) -> PublishedSnapshot | None:
        """Begin a snapshot; `now`: and finish it."""
        snapshots, diary = self._around.snapshots, self._around.diary
        if diary is not None:
            diary.interval.took_snapshot(point.step)
        faults = self._around.faults
        halfway = None if faults is None else faults.in_snapshot(point.step)
        if snapshots is None:
            if halfway is not None:  # another worker of this node copies
                halfway()
            return None
        is_at_once = self._around.world.device.type == "cpu"  # the copy from host memory
        late = frozenset[int]() if is_at_once else self._state.updated_addresses
        snapshots.start(self._state.flatten(), point, late=late, patient=patient, halfway=halfway)
        return self._finish_snapshot() if now or is_at_once else None

    def _finish_snapshot(self) -> PublishedSnapshot | None:
        snapshots, diary = self._around.snapshots, self._around.diary
        taken = None if snapshots is None else snapshots.finish()
        if taken is None or snapshots is None or diary is None:
            return taken
        interval = diary.interval
        if interval.learn(snapshots.cost_s) and interval.steps is not None:
            every, cost_s, step_s = interval.steps, interval.cost_s, interval.step_s
            diary.log.record(SnapshotInterval(every=every, cost_s=cost_s, step_s=step_s))
        return taken

    def _save(self, taken: PublishedSnapshot | None, point: StepRecord, *, final: bool) -> None:
        began_at = self._around.clock.monotonic()
        self._agree(point, taken)
        if self._around.diary is not None:
            # The metrics of a step must not be lost where its checkpoint is kept.
            self._around.diary.metrics.sync()
            self._around.diary.saving.save(taken, point.step, began_at=began_at, final=final)

    def _agree(self, point: StepRecord, taken: PublishedSnapshot | None) -> None:
        kept = None if taken is None else str(taken.snapshot.about["checksum"])
        check_same_snapshots(self._around.world, kept, self._state.flatten, f"after step {point.step}")

    def _drain(self, point: StepRecord, taken: PublishedSnapshot | None) -> None:
        around = self._around
        problem = ""
        if around.commits_drains:
            problem = self._save_and_wait(point, taken)
        else:
            self._agree(point, taken)
            if around.diary is not None:
                around.diary.metrics.sync()
        if around.diary is not None:
            committed = around.commits_drains and not problem
            around.diary.log.record(Drained(step=point.step, committed=committed))
        if problem:
            raise StoreFailed(f"stopped after step {point.step}, which could not be saved: {problem}")
        raise SystemExit(EXIT_INTERRUPTED)

    def _save_and_wait(self, point: StepRecord, taken: PublishedSnapshot | None) -> str:
        """Save what no later save will make good, and see it committed; returns what went wrong, or nothing."""
        problem = ""
        for _ in range(FINAL_TRIES):
            self._save(taken, point, final=True)
            problem = self._commit(point.step)
            if not problem:
                break
        return problem

    def _commit(self, number: int) -> str:
        """Every rank learns whether rank 0's save of this step is committed; returns what went wrong."""
        diary = self._around.diary
        return str(self._around.world.from_first(diary.saving.wait(number) if diary is not None else ""))

    def _end(self, loaded: ResumePoint) -> None:
        """See the last state committed, which this generation trained or found in memory."""
        self._around.pulse.enter(Phase.SAVE)
        if self._final is None:
            assert loaded.step == self._order.steps
            found = StepRecord(
                step=loaded.step, epoch=self._order.epochs - 1, chain=loaded.chain, line=loaded.line or {}
            )
            self._final = found, self._keep(found, now=True, patient=True)
        last, taken = self._final
        problem = self._save_and_wait(last, taken)
        if problem:
            raise StoreFailed(f"trained to the last step, {last.step}, which could not be saved: {problem}")
        if self._around.diary is not None:
            self.digest = self._around.diary.saving.digest


def _link(chain: str, outcome: StepOutcome) -> str:
    """The next value of the chain: sha256 over the one before, the loss and the gradient norms, as bits."""
    # One NaN, whatever bits it has: which of two is kept by an addition depends on their order.
    numbers = [
        math.nan if math.isnan(number) else number for number in (outcome.loss, *outcome.gradient_norms)
    ]
    return hashlib.sha256(bytes.fromhex(chain) + struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()
