"""A recipe sees one step after another; resumes, snapshots, saves and drains are hidden.

After each step every rank knows the same: the loss, and whether to take a snapshot, to save, to
drain. A step leaves behind, in this order: its line in the metrics, its snapshot, its number on the
control page, the offer to the uploader. A drain ends the process with the interrupted exit code
once the state of its last step is in the agent's memory, or no room for it came in time. It does
not commit that state: the agent does, if the run ends there. (Without an agent the loop commits
it.)

The run ends after its last step, or after an earlier one where the recipe leaves the loop (`leave`,
called from outside) or asks for its end (`stop_reason`). A step that the recipe leaves counts once
its gradients were computed, with the state as it is then; a step that it leaves before has not
begun.

A thread may run the body of a step for the thread that runs the script, which waits for it. If
that one takes the next step meanwhile, the open step has no gradients, and that is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from elastic.data.loader import Batch
from elastic.errors import EXIT_COMPLETE, StoreFailed
from elastic.events import ShardsMoved, Stopped
from elastic.observe.step_line import StepLine
from elastic.proof.agreement import Agreement
from elastic.proof.audit import Auditor, StepAudit
from elastic.reduce.balance import Balance
from elastic.reduce.tree import spans_of
from elastic.snapshot.slots import SnapshotInfo
from elastic.system.silence import Phase
from elastic.train import refuse
from elastic.train.loop import leaving
from elastic.train.loop.build import LoopParts
from elastic.train.loop.record import StepRecorder
from elastic.train.loop.requests import Asking, act_on_requests, is_first_audited
from elastic.train.state.flat import checksum_of
from elastic.train.state.resume import resume
from elastic.train.state.saving import SavedState, Saving
from elastic.train.step.parts import Requests, StepParts, StepPlace
from elastic.train.step.step import Step


class Loop:
    """The training loop of one rank in one generation.

    step: the one whose body the recipe runs. stop_reason: why the run is to end after it, if the
    recipe has asked for that. stopped: where the recipe ended the run early, if it did. digest: of
    the checkpoint of the last step, once it is committed.
    """

    def __init__(self, parts: LoopParts) -> None:
        self.parts = parts
        self.step: Step | None = None
        self.stop_reason: str | None = None
        self.stopped = parts.stopped
        self.digest = ""
        self._passed = 0  # the last step whose body is over
        self._line: StepLine | None = None  # of the step before, if it is new
        self._kept: SavedState | None = None  # its state, if that was voted for

    def run(self) -> Iterator[Step]:
        """The steps that are left.

        Raises SystemExit at a drain; StoreFailed when the last state cannot be saved.
        """
        self._begin()
        parts, first = self.parts, self._began.step + 1
        auditor = Auditor(self.parts, self._of_steps, self._compare_states, self._began.step)
        batches = self._batches(first)
        exchange, is_audited = self._of_steps.exchange, is_first_audited(parts, first)
        for number in range(first, self.last_step + 1):
            step = self._open(number, batches, auditor, is_audited=is_audited)
            yield step
            self._check_body(step, first)
            if self.stop_reason is not None:
                self.leave(self.stop_reason)
                return
            self.step, self._passed = None, number
            is_audited = self._finish(step).audit
            if exchange.is_reversed or self._balance is not None:
                self._deal_shards(step)
            if parts.trace is not None and parts.trace.is_over(number):
                parts.page.set_open_step(parts.groups.local_rank, None)
                raise SystemExit(EXIT_COMPLETE)
        self._close()
        self._end()

    # How far this rank is, for the calls of a run that belong to no step.

    @property
    def last_step(self) -> int:
        """Of the run, as far as it is known."""
        return self.parts.loader.order.steps if self.stopped is None else self.stopped.step

    @property
    def epochs(self) -> int:
        """That are complete when the run ends."""
        return self.parts.loader.order.position(self.last_step + 1)[0]

    @property
    def place(self) -> StepPlace:
        """How far this rank is."""
        return StepPlace(self._passed + 1, passes=0, computed=False) if self.step is None else self.step.place

    def checksum(self) -> str:
        """The checksum of the whole state, as it is now on this rank; all ranks ask for it."""
        return self.parts.state.checksum().whole

    def own_checksum(self) -> str:
        """That of the rows that this rank holds, without the other ranks."""
        return checksum_of(self.parts.state.flatten()).whole

    def say(self, sentence: str) -> None:
        """Once, on the console."""
        if self.parts.output is not None:
            print(sentence, flush=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While an evaluation in the body of a step runs, which is no part of the step."""
        self._saving.finish_copy()  # the evaluation may be longer than this node has time
        begin_s = self.parts.clock.monotonic()
        yield
        self._recorder.evaluated_s += self.parts.clock.monotonic() - begin_s

    # The begin of a generation.

    def _begin(self) -> None:
        parts = self.parts
        # Until the loop has ended, the agent takes an end of this process for a failure, also one
        # with exit code 0.
        parts.page.set_open_step(parts.groups.local_rank, 0)
        resumed = resume(parts, self.stopped, parts.again.look())
        point = self._began = resumed.point
        parts.again.restored(point.step, is_doubtful=point.divergence is not None)
        agreement = self._agreement = Agreement(
            comparison=parts.comparison,
            page=parts.page,
            snapshotting=parts.snapshotting,
            evidence=parts.state.evidence,
            step=point.step,
            known=point.divergence,
        )
        agreement.begin()
        if parts.state.sharded is not None:  # the first step may find that rows have changed
            agreement.add(point.step, point.checksum, parts.state.flatten().tensors)
        self._of_steps = StepParts(
            parts.state, parts.loader.order, parts.groups, parts.heartbeat, agreement, parts.again.collected
        )
        self._saving = Saving(parts, agreement, point)
        self._asking = Asking(parts, self._saving)
        self._recorder = StepRecorder(parts, resumed, self._of_steps.contract.mark)
        if point.source == "parent":
            # The state of another run becomes this run's own, so that the other one may go.
            parts.heartbeat.enter(Phase.SAVE)
            if problem := self._saving.commit(self._saving.keep(self._recorder.info(0))):
                self.say(
                    f"the state that this run begins from is not saved: {problem}; keep the other run until this one has a checkpoint"
                )

    def _compare_states(self) -> None:
        """Check, before the update of the open step, that all ranks had one state after the last.

        Raises StatesDiffer or RecipeNotExact on every rank if they had not.
        """
        self._of_steps.buffers.load()  # the step may have changed them already
        # In its first step a generation has just compared them. After the step's first loss an
        # optimizer may have updated some.
        if self._line is not None and self.step is not None and self.step.outcome is None:
            self._agreement.compare_anew(self._line.step)

    def _batches(self, first: int) -> Iterator[list[Batch]]:
        """The batches of this rank's shards, for each step from `first` on."""
        parts, exchange = self.parts, self._of_steps.exchange
        balance = self._balance = self._balance_of(parts.loader.reads_ahead(len(exchange.own_shards)))
        own, is_dealt_anew = exchange.own_shards, parts.again.earlier.is_dealt_anew
        self._usual = exchange.spans
        if is_dealt_anew:
            exchange.divide(self._usual[::-1], is_reversed=True)

        def shards_of(step: int) -> range:
            if is_dealt_anew and step == first:
                return exchange.own_shards[::-1]
            return own if balance is None else spans_of(balance.counts(step))[exchange.rank]

        return parts.loader.steps_of(shards_of, first)

    def _balance_of(self, reads_ahead: int) -> Balance | None:
        """What has the shards of each rank follow its speed; None where spans stay equal.

        It is no part of the training's state: a new generation begins with equal spans. On GPUs a
        rank's own seconds lack what its host waits for (Pace); a check compares other spans. Nodes
        may be started with other options. Raises PeerLost.
        """
        parts = self.parts
        is_wanted = parts.link.options.balance == "auto" and parts.trace is None
        is_wanted &= (
            parts.groups.device.type == "cpu" and parts.groups.world_size > 1 and parts.state.sharded is None
        )
        of_ranks: list[list[int]] = parts.groups.all_gather([int(is_wanted), reads_ahead])
        if not all(wanted for wanted, _ in of_ranks):
            return None
        return Balance(tuple(map(len, self._of_steps.exchange.spans)), max(ahead for _, ahead in of_ranks))

    # One step.

    def _open(
        self, number: int, batches: Iterator[list[Batch]], auditor: Auditor, *, is_audited: bool
    ) -> Step:
        """The step that the recipe gets. Until its first sum the recipe may evaluate something."""
        parts = self.parts
        if is_audited and parts.output is not None:
            parts.output.audits.interval.begin(number)
        audit = partial(StepAudit, auditor) if is_audited else None
        load = partial(next, batches)
        if parts.state.sharded is not None:
            load = partial(parts.state.sharded.with_filler, load, partial(parts.loader.shard, number))
        step = self.step = Step(number, self._of_steps, load, self._requests, audit)
        if parts.faults is not None:
            step.fault_point = parts.faults.at_step(number)
        if (snapshotting := parts.snapshotting) is not None and snapshotting.under_way is not None:
            snapshotting.copy.before_forward()
        if parts.trace is not None:
            parts.again.collected.begin(number)
        parts.heartbeat.enter(Phase.BETWEEN)
        self._recorder.open()
        parts.page.set_open_step(parts.groups.local_rank, number)
        return step

    def _requests(self, number: int) -> Requests:
        """Asked when gradients are summed."""
        parts = self.parts
        if (snapshotting := parts.snapshotting) is not None and snapshotting.under_way is not None:
            snapshotting.copy.before_update()
        return self._asking.ask(number, self._recorder.opened_s, self.last_step)

    def _check_body(self, step: Step, first: int) -> None:
        """The recipe asks for the next step. An error of this step ends the run, caught or not."""
        refuse.use_in_forked_child()
        if step.error is not None:
            raise step.error
        if step.number == first:  # from here on an optimizer has state
            self.parts.state.check_savable()

    def _finish(self, step: Step) -> Requests:
        """After the recipe's optimizer: leave behind what the step leaves behind, in order.

        Returns what the ranks have asked for, as far as it concerns the next step.
        """
        parts, saving = self.parts, self._saving
        outcome = step.outcome or step.end_by_hand()
        self._of_steps.contract.end_step()
        if step.fault_point is not None:
            step.fault_point("optimizer")
        if parts.snapshotting is not None and parts.snapshotting.under_way is not None:
            saving.finish_copy()
        # Without a drain that comes one step later, because that step is to be compared.
        requests, last_step = outcome.requests, self.last_step
        is_last = step.number == last_step
        if any(requests) or parts.again.earlier.found or parts.again.closing:
            requests = act_on_requests(parts, self._agreement, step, outcome, last_step)
        self._line, self._kept = self._recorder.record(step, outcome), None
        ends = requests.drain or is_last
        if ends or requests.snapshot or requests.save or requests.compare:
            self._kept = self._keep(step, self._recorder.info(step.number, self._line), requests, ends=ends)
        parts.page.set_step(parts.groups.local_rank, step.number)
        if self._kept is not None and not is_last:
            if requests.drain:
                saving.drain(self._kept)
            elif requests.save:
                saving.offer(self._kept)
        parts.heartbeat.finish_step()
        return requests

    def _keep(self, step: Step, info: SnapshotInfo, requests: Requests, *, ends: bool) -> SavedState:
        """Vote for the state after the step, and take the snapshot that is asked for."""
        parts = self.parts
        parts.heartbeat.enter(Phase.SAVE)
        copies = ends or requests.snapshot or requests.save
        wait = ends or requests.save or parts.again.closing > step.number
        saved = self._saving.keep(info, copies=copies, wait=wait, patient=ends)
        if copies and step.fault_point is not None:
            step.fault_point("after-snapshot")
        return saved

    def _deal_shards(self, step: Step) -> None:
        """The step is over: which shards each rank has from the next one on.

        An audited step says nothing of speeds: its audit takes time, too.
        """
        exchange, balance, output = self._of_steps.exchange, self._balance, self.parts.output
        if exchange.is_reversed:
            exchange.divide(self._usual)
        elif balance is not None:
            own_s = None if step.outcome is None or step.audit is not None else step.outcome.own_s
            shards = balance.add(step.number, own_s)
            if shards is not None and output is not None:
                before = [len(each) for each in exchange.spans]
                output.log.record(ShardsMoved(step=balance.effective, shards=list(shards), before=before))
            if step.number + 1 == balance.effective:
                exchange.divide(spans_of(balance.counts(balance.effective)))

    # The end.

    def leave(self, reason: str) -> None:
        """The recipe has left the body of the open step: the run ends here, on all ranks.

        Raises the error of the step that the recipe caught, UsageError where ranks left at
        different places, and what the end of a run raises.
        """
        step, parts, contract = self.step, self.parts, self._of_steps.contract
        assert step is not None
        if step.error is not None:
            raise step.error
        parts.again.refuse_end(step.number)
        parts.heartbeat.enter(Phase.AFTER)  # the others may still evaluate something of their own
        self._close()  # before the groups, which a thread uses
        is_done = step.outcome is not None
        # A rank that leaves the last step after its update ends where all end.
        is_cut = is_done and contract.has_waiting_gradients()
        if not is_done or is_cut or step.number < self.last_step:
            parts.groups = leaving.agree(parts.groups, step.place, keeps=parts.state.sharded is not None)
        end = step.number if is_done else step.number - 1
        if not is_done:
            has_same_mark = contract.has_same_mark()
            step.abandon()
            leaving.check_unchanged(parts, step.number, self._began, self._kept, has_same_mark=has_same_mark)
        parts.heartbeat.enter(Phase.SAVE)
        if end < self.last_step or is_cut:
            reason = (self.stop_reason or reason) + (", with unused gradients" if is_cut else "")
            self.stopped = leaving.stop(parts, reason, end)
        self.step, self._passed = None, end
        if is_done:
            self._finish(step)
        elif self._line is not None:  # all ranks vote once more; some of them have a snapshot
            self._saving.finish_copy()
            self._kept = self._saving.keep(self._recorder.info(end, self._line))
        self._end()

    def _close(self) -> None:
        self._of_steps.gradients.close()
        self._of_steps.contract.close()

    def _end(self) -> None:
        """Commit the state of the last step, if it is not committed."""
        parts, began, last, output = self.parts, self._began, self._kept, self.parts.output
        parts.heartbeat.enter(Phase.SAVE)
        self.digest = began.digest
        # The last step's state was in memory, or it was saved in parts without its digest.
        if last is None and not (began.source == "checkpoint" and began.digest):
            last = self._saving.keep(self._recorder.info(began.step, began.line))
        if last is not None:
            if problem := self._saving.commit(last, wants_digest=True):
                raise StoreFailed(
                    f"trained to the last step, {last.info.step}, which could not be saved: {problem}"
                )
            if self._saving.checkpointing is not None:
                self.digest = self._saving.checkpointing.digest
        if output is not None and (ended := self.stopped) is not None:
            output.log.record(Stopped(step=ended.step, steps=ended.steps, reason=ended.reason))
        parts.page.set_open_step(parts.groups.local_rank, None)
        parts.heartbeat.enter(Phase.AFTER)
