"""A recipe sees one step after another; resumes, snapshots, saves and drains are hidden.

After each step every rank knows the same: the loss, and whether to take a snapshot, to save, to
drain. A step leaves behind, in this order: its line in the metrics, its snapshot, its number on the
control page, the offer to the uploader. A drain ends the process with the interrupted exit code
once the state of its last step is in the agent's memory, or half a minute has brought no room for
it there. It does not commit that state: the agent does, if the run ends there. (Without an agent
the loop commits it.)

The run ends after its last step, or after an earlier one where the recipe leaves the loop (`leave`,
called from outside) or asks for its end (`stop`). A step that the recipe leaves counts once its
gradients were computed, with the state as it is then; a step that it leaves before has not begun.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from elastic.checkpoint.stop_record import StopRecord
from elastic.data.loader import Loader
from elastic.data.record import check_ranks, check_resume, record_of
from elastic.divergence import Divergence
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, StoreFailed, UsageError
from elastic.events import Drained, FirstStep, Restored, RunStarted, SettingsIgnored, Stopped
from elastic.faults.inject import WorkerFaults
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.snapshot.image import LiveChecksum
from elastic.snapshot.slots import SnapshotInfo
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.control_page import ControlPage
from elastic.system.phase import Phase
from elastic.train import as_built, refuse, restore_reasons
from elastic.train.agreement import Agreement
from elastic.train.audit import Auditor
from elastic.train.audit_schedule import AuditSchedule
from elastic.train.buffers import Buffers
from elastic.train.checkpointing import Checkpointing
from elastic.train.consistency import Comparison
from elastic.train.contract import Contract
from elastic.train.early_end import check_unchanged, write_down
from elastic.train.leaving import StepPlace, agree
from elastic.train.process_groups import ProcessGroups
from elastic.train.restore import Restorer, ResumePoint
from elastic.train.schedule import ComparisonSchedule, SnapshotSchedule
from elastic.train.shard_outputs import AgreedForms
from elastic.train.snapshotting import PublishedSnapshot, Snapshotting, layout_of
from elastic.train.state import State, checksum_of
from elastic.train.step import Requests, Step, StepOutcome, StepParts
from elastic.train.trace import StateTrace
from elastic.train.whole_batch import FirstGradientCheck
from elastic.worker.heartbeat import HeartbeatSender

FINAL_TRIES = 3
REASON_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank0Output:
    """What rank 0 alone writes, and decides for all ranks. store: of the run directory."""

    store: Store
    log: EventLog
    checkpointing: Checkpointing
    schedule: SnapshotSchedule
    audits: AuditSchedule
    comparing: ComparisonSchedule


@dataclass(slots=True, kw_only=True)
class Loop:
    """The training loop of one rank in one generation.

    output: on rank 0 alone. metrics: on rank 0, and where nodes share no folder a copy on each
    other node. snapshotting: on one worker of each node. faults: None without a plan.
    commits_drains: this process commits a drained state itself, since it has no agent. run_id: of
    the run. stopped: where the recipe ended the run early, if it did. trace: where `elastic-train
    check` tries the recipe, else None. digest: of the checkpoint of the last step, once it is
    committed.
    """

    loader: Loader
    state: State
    groups: ProcessGroups
    node: str
    generation: int
    redo: Divergence | None
    clock: Clock
    page: ControlPage
    heartbeat: HeartbeatSender
    restorer: Restorer
    comparison: Comparison
    output: Rank0Output | None
    metrics: Metrics | None
    snapshotting: Snapshotting | None
    faults: WorkerFaults | None
    commits_drains: bool
    run_id: str
    stopped: StopRecord | None = None
    trace: StateTrace | None = None
    digest: str = ""
    _agreement: Agreement = field(init=False)
    _chain: str = ""
    _data: tuple[int, str] = (-1, "")  # an epoch, and what stands beside a state of it
    _started_s: float = 0.0
    _first_new: int = 0  # the first step that no generation has trained before; rank 0 knows it
    _parts: StepParts | None = None
    _open: Step | None = None  # the step whose body the recipe runs
    _passed: int = 0  # the last step whose body is over
    _last: tuple[SnapshotInfo, PublishedSnapshot | None] | None = None  # of that step, if it is new
    _resumed: ResumePoint | None = None
    _stop_reason: str | None = None

    def run(self) -> Iterator[Step]:
        """The steps that are left.

        Raises SystemExit at a drain; StoreFailed when the last state cannot be saved.
        """
        refuse.modules(self.state, self.groups.device)
        resumed = self._resumed = self._resume()
        if resumed.source == "parent":
            self._commit_start()
        parts = self._parts = self._step_parts()
        auditor = self._auditor(parts)
        is_audited = self._is_first_audited(resumed.step + 1)
        batches = self.loader.steps(parts.exchange.own_shards, resumed.step + 1)
        self._started_s = self.clock.monotonic()
        for number in range(resumed.step + 1, self.last_step + 1):
            if is_audited and self.output is not None:
                self.output.audits.begin(number)
            watched_by = self._watched_by(number, auditor if is_audited else None, auditor)
            step = Step(number, parts, next(batches), self._requests, watched_by)
            if self.faults is not None:
                step.fault_point = self.faults.at_step(number)
            if self.snapshotting is not None:
                self.snapshotting.copy.before_forward()
            # Until its first sum the step is the recipe's own code, which may evaluate a model
            # there.
            self.heartbeat.enter(Phase.BETWEEN)
            self._open = step
            yield step
            if number == resumed.step + 1:  # from here on an optimizer has state
                self.state.check_savable()
            if self._stop_reason is not None:
                self.leave(self._stop_reason)
                return
            self._open, self._passed = None, number
            self._last = self._finish(step)
            is_audited = step.outcome is not None and step.outcome.requests.audit
            if self.trace is not None and self.trace.is_over(number):
                raise SystemExit(EXIT_COMPLETE)
        self._close(parts)
        self._end()

    @property
    def last_step(self) -> int:
        """Of the run, as far as it is known."""
        return self.loader.order.steps if self.stopped is None else self.stopped.step

    @property
    def is_in_step(self) -> bool:
        """Whether the recipe has taken a step and not asked for the next one."""
        return self._open is not None

    @property
    def place(self) -> StepPlace:
        """How far this rank is."""
        if self._open is not None:
            return self._open.place
        return StepPlace(step=self._passed + 1, passes=0, computed=False)

    def checksum(self) -> str:
        """Of the whole state, as it is now on this rank."""
        return checksum_of(self.state.flatten()).whole

    def say(self, sentence: str) -> None:
        """Once, on the console."""
        if self.output is not None:
            print(sentence, flush=True)

    def stop(self, reason: str) -> None:
        """End the run after the step whose body runs. Raises UsageError outside of a body."""
        if self._open is None:
            raise UsageError(
                "expected run.stop(reason) in the body of the loop over run.steps, found it outside"
            )
        self._stop_reason = str(reason)[:REASON_LIMIT] or "run.stop"

    def leave(self, reason: str) -> None:
        """The recipe has left the body of the open step: the run ends here, on all ranks.

        Raises UsageError where ranks left at different places, and what the end of a run raises.
        """
        step, order = self._open, self.loader.order
        assert step is not None
        assert self._parts is not None
        self.heartbeat.enter(Phase.AFTER)  # the others may still evaluate something of their own
        self._close(self._parts)  # before the groups, which a thread uses
        self.groups = agree(self.groups, step.place)
        is_done = step.outcome is not None
        end = step.number if is_done else step.number - 1
        if not is_done:
            step.abandon()
            assert self._resumed is not None
            check_unchanged(
                self.state, step.number, self._resumed, None if self._last is None else self._last[1]
            )
        self.heartbeat.enter(Phase.SAVE)
        if end < self.last_step:
            stopped = StopRecord(
                run_id=self.run_id, step=end, steps=order.steps, reason=self._stop_reason or reason
            )
            write_down(stopped, self.groups, None if self.output is None else self.output.store, self.clock)
            self.stopped = stopped
        self._open, self._passed = None, end
        if is_done:
            self._last = self._finish(step)
        elif self._last is not None:  # all ranks vote anew, of which some may have a snapshot
            self._last = self._begin_to_save(self._last[0])
        self._end()

    def _close(self, parts: StepParts) -> None:
        parts.gradients.close()
        parts.contract.close()

    def _end(self) -> None:
        """Commit the state of the last step, if it is not committed."""
        resumed, last = self._resumed, self._last
        assert resumed is not None
        self.heartbeat.enter(Phase.SAVE)
        self.digest = resumed.digest
        if last is None and resumed.source != "checkpoint":  # the last step's state was in memory
            epoch = self.loader.order.position(resumed.step)[0] if resumed.step else 0
            last = self._begin_to_save(self._info(resumed.step, epoch, resumed.line))
        if last is not None:
            self._commit_last(*last)
        if self.stopped is not None and self.output is not None:
            ended = self.stopped
            self.output.log.record(Stopped(step=ended.step, steps=ended.steps, reason=ended.reason))
        self.heartbeat.enter(Phase.AFTER)

    def _step_parts(self) -> StepParts:
        groups, order = self.groups, self.loader.order
        exchange = Exchange(
            shards=order.shards, world_size=groups.world_size, rank=groups.rank, group=groups.gradients
        )
        contract = Contract(self.state, global_batch=order.global_batch, shards=order.shards)
        gradients = Gradients(contract, exchange)
        return StepParts(
            exchange=exchange,
            contract=contract,
            gradients=gradients,
            forms=AgreedForms(exchange, groups.device),
            buffers=Buffers(self.state, order.shards, groups.device),
            device=groups.device,
            heartbeat=self.heartbeat,
            order=order,
            agreement=self._agreement,
        )

    def _watched_by(
        self, step: int, audit: Auditor | None, auditor: Auditor
    ) -> Auditor | FirstGradientCheck | None:
        return (None if self.trace is None else self.trace.witness_of(step, auditor)) or audit

    def _auditor(self, parts: StepParts) -> Auditor:
        return Auditor(
            groups=self.groups,
            loader=self.loader,
            state=self.state,
            buffers=parts.buffers,
            gradients=parts.gradients,
            heartbeat=self.heartbeat,
            clock=self.clock,
            node=self.node,
            generation=self.generation,
            redo=self.redo,
            log=None if self.output is None else self.output.log,
        )

    def _is_first_audited(self, step: int) -> bool:
        """Later steps learn it from the sum of the step before."""
        is_due = self.output is not None and self.output.audits.is_due(step, is_first=True)
        return self.groups.from_rank0(is_due)

    def _resume(self) -> ResumePoint:
        output, order = self.output, self.loader.order
        built = self.state.begin()  # refuses before anything is trained or written
        as_built.check_alike(self.groups.all_gather(built))
        began_s = self.clock.monotonic()
        if output is not None:
            sizes = {"global_batch": order.global_batch, "shards": order.shards}
            output.log.record(RunStarted(steps=order.steps, epochs=order.epochs, seed=order.seed, **sizes))
        check_ranks(self.groups.all_gather(record_of(order, 0)))
        resumed = self.restorer.restore(self.state)
        said = "" if resumed.data is None else check_resume(resumed.data, order, resumed.step)
        if said and output is not None:
            print(said)
        if output is not None and self.stopped is not None and resumed.step >= self.stopped.step:
            self.say(f"this run was {self.stopped}: no step is left")
        self._chain = resumed.chain
        self.page.set_step(self.groups.local_rank, resumed.step)
        highest = 0 if self.metrics is None else _rewind(self.metrics, resumed)
        if output is not None:
            output.checkpointing.resume(resumed.step, resumed.source)
            self._first_new = max(resumed.step, highest) + 1
            lost_steps, seconds = self._first_new - 1 - resumed.step, self.clock.monotonic() - began_s
            output.log.record(
                Restored(step=resumed.step, source=resumed.source, lost_steps=lost_steps, seconds=seconds)
            )
            if self.state.ignored:
                output.log.record(SettingsIgnored(step=resumed.step, settings=self.state.ignored))
                print(restore_reasons.ignored(self.state.ignored, self.restorer.run_url))
        self._agreement = Agreement(
            comparison=self.comparison,
            page=self.page,
            snapshotting=self.snapshotting,
            flatten=self.state.flatten,
            step=resumed.step,
            known=resumed.divergence,
        )
        self._agreement.begin()
        return resumed

    def _commit_start(self) -> None:
        """Make the state that came from another run this run's own, so that the parent may go."""
        self.heartbeat.enter(Phase.SAVE)
        info, published = self._begin_to_save(self._info(0, 0, None))
        self._agree()
        problem = self._save_and_wait(info, published, tries=1)
        if problem and self.output is not None:
            print(
                f"the state that this run begins from is not saved: {problem}; keep the other run until this one has a checkpoint"
            )

    def _requests(self, number: int) -> Requests:
        output = self.output
        if self.snapshotting is not None:
            self.snapshotting.copy.before_update()
        drain = self.page.drain or (self.trace is not None and self.trace.wants_drain(number))
        if output is None or number == self.last_step:
            return Requests(drain=drain, snapshot=False, save=False, compare=False)
        snapshot, save = output.schedule.is_due(number), output.checkpointing.is_due(number)
        is_due = self.groups.world_size > 1 and output.comparing.is_due(number)
        compare = snapshot or save or is_due or self._agreement.is_wanted(number)
        audit = output.audits.is_due(number + 1)
        return Requests(drain=drain, snapshot=snapshot, save=save, compare=compare, audit=audit)

    def _finish(self, step: Step) -> tuple[SnapshotInfo, PublishedSnapshot | None]:
        """After the recipe's optimizer: leave behind what the step leaves behind, in order."""
        outcome = step.outcome
        if outcome is None:
            raise UsageError(
                f"step {step.number} ended without gradients: expected step.backward(loss) or step.mean_loss(...) in the body of the loop"
            )
        step.fault_point("optimizer")
        if self.snapshotting is not None:
            # Of an earlier step, if its copy from the GPU ran beside this one.
            self._add_cost(self.snapshotting.finish())
        info = self._record(step, outcome)
        requests, is_last, published = outcome.requests, step.number == self.last_step, None
        if is_last or any(requests):
            self.heartbeat.enter(Phase.SAVE)
            ends = requests.drain or is_last
            takes_snapshot = ends or requests.snapshot or requests.save
            if takes_snapshot:
                published = self._take_snapshot(info, wait=ends or requests.save, patient=ends)
            self._vote(info, published)
            if takes_snapshot:
                step.fault_point("after-snapshot")
        self.page.set_step(self.groups.local_rank, step.number)
        if requests.drain and not is_last:
            self._drain(info, published)
        elif requests.save and not is_last:
            began_s = self.clock.monotonic()
            self._agree()
            if self.output is not None:
                self.output.checkpointing.save(published, info.step, began_s=began_s)
        self.heartbeat.finish_step()
        self.heartbeat.enter(Phase.BETWEEN)
        return info, published

    def _record(self, step: Step, outcome: StepOutcome) -> SnapshotInfo:
        """Write the step's line into the metrics; returns what stands beside the step's state."""
        self._chain = _next_chain(self._chain, outcome)
        seconds = self.clock.monotonic() - self._started_s
        line = StepLine(
            step=step.number,
            epoch=step.epoch,
            loss=outcome.loss,
            chain=self._chain[:16],
            world_size=self.groups.world_size,
            generation=self.generation,
            time=self.clock.wall(),
            seconds=seconds,
            audited=None if step.audit is None else True,
            values=step.logged,
        )
        if self.metrics is not None:
            self.metrics.append(line)
        if self.trace is not None:
            self.trace.add(line, self.state.flatten(), step)
        if self.output is not None:
            self.output.schedule.add_step(seconds)
            self.output.audits.add_step(seconds)
            if step.audit is not None:
                self.output.audits.add_audit(step.audit.cost_s)
            if step.number == self._first_new:
                self.output.log.record(FirstStep(step=step.number))
        self._started_s = self.clock.monotonic()
        return self._info(step.number, step.epoch, line)

    def _info(self, step: int, epoch: int, line: StepLine | None) -> SnapshotInfo:
        return SnapshotInfo(
            step=step,
            epoch=epoch,
            generation=self.generation,
            world_size=self.groups.world_size,
            torch=torch.__version__,
            chain=self._chain,
            line=None if line is None else line.to_json(),
            data=self._data_of(epoch),
        )

    def _data_of(self, epoch: int) -> str:
        if self._data[0] != epoch:  # once in an epoch, and not in each step
            self._data = epoch, record_of(self.loader.order, epoch).to_json()
        return self._data[1]

    def _take_snapshot(self, info: SnapshotInfo, *, wait: bool, patient: bool) -> PublishedSnapshot | None:
        if self.output is not None:
            self.output.schedule.requested(info.step)
        halfway = None if self.faults is None else self.faults.in_snapshot(info.step)
        if self.snapshotting is None:
            if halfway is not None:  # another worker of this node copies
                halfway()
            return None
        return self._add_cost(
            self.snapshotting.take(
                self.state.flatten(),
                info,
                late=self.state.updated_addresses,
                wait=wait,
                patient=patient,
                halfway=halfway,
            )
        )

    def _add_cost(self, published: PublishedSnapshot | None) -> PublishedSnapshot | None:
        output = self.output
        if published is not None and output is not None:
            changed = output.schedule.add_cost(published.cost_s)
            if changed is not None:
                output.log.record(changed)
        return published

    def _begin_to_save(self, info: SnapshotInfo) -> tuple[SnapshotInfo, PublishedSnapshot | None]:
        """Of a state with which this process began."""
        published = self._take_snapshot(info, wait=True, patient=True)
        self._vote(info, published)
        return info, published

    def _vote(self, info: SnapshotInfo, published: PublishedSnapshot | None) -> None:
        """Have this rank's state compared with the others', from its copy if there is one."""
        began_s, cost_s = self.clock.monotonic(), None
        if published is not None:
            self._agreement.add(info.step, published.snapshot.info.checksum)
        else:
            self._agreement.add(info.step, LiveChecksum(layout_of(self.state.flatten(), info)))
            cost_s = self.clock.monotonic() - began_s
        if self.output is not None:
            self.output.comparing.compared(info.step, cost_s, self.output.schedule.step_s)

    def _agree(self) -> None:
        """Before a state becomes a checkpoint: all ranks have it, and the metrics have its step."""
        self._agreement.compare()
        if self.output is not None and self.metrics is not None:
            self.metrics.sync()

    def _drain(self, info: SnapshotInfo, published: PublishedSnapshot | None) -> None:
        self._agree()
        problem = self._save_and_wait(info, published) if self.commits_drains else ""
        if self.output is not None:
            committed = self.commits_drains and not problem
            self.output.log.record(Drained(step=info.step, committed=committed))
        if problem:
            raise StoreFailed(f"stopped after step {info.step}, which could not be saved: {problem}")
        # The agent tells this exit from one that is the recipe's own by it, also if another node's
        # agent asked for the drain.
        self.page.drain = True
        raise SystemExit(EXIT_INTERRUPTED)

    def _save_and_wait(
        self, info: SnapshotInfo, published: PublishedSnapshot | None, tries: int = FINAL_TRIES
    ) -> str:
        """Save a state before which or after which there is no other; wait until it is committed.

        Returns what went wrong, or nothing; the same on every rank.
        """
        output, problem = self.output, ""
        for _ in range(tries):
            found = ""
            if output is not None:
                output.checkpointing.save(published, info.step, began_s=self.clock.monotonic(), final=True)
                found = output.checkpointing.wait(info.step)
            problem = self.groups.from_rank0(found)
            if not problem:
                break
        return problem

    def _commit_last(self, info: SnapshotInfo, published: PublishedSnapshot | None) -> None:
        self._agree()
        problem = self._save_and_wait(info, published)
        if problem:
            raise StoreFailed(f"trained to the last step, {info.step}, which could not be saved: {problem}")
        if self.output is not None:
            self.digest = self.output.checkpointing.digest


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
