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

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from elastic.checkpoint.stop_record import StopRecord
from elastic.data.loader import Batch
from elastic.errors import EXIT_COMPLETE, ElasticError, StoreFailed
from elastic.events import Stopped
from elastic.proof.agreement import Agreement
from elastic.proof.audit import Auditor
from elastic.proof.evidence import Evidence
from elastic.proof.first_gradient import FirstGradientCheck
from elastic.proof.step_again import texts_of
from elastic.proof.variables import variables_of
from elastic.snapshot.slots import SnapshotInfo
from elastic.system.phase import Phase
from elastic.system.raised_error import ErrorPlace
from elastic.train import refuse
from elastic.train.groups import ProcessGroups
from elastic.train.loop import early_end
from elastic.train.loop import requests as step_requests
from elastic.train.loop.first_step_notes import notes
from elastic.train.loop.leaving import StepPlace, agree
from elastic.train.loop.parts import LoopParts
from elastic.train.loop.progress import LoopProgress
from elastic.train.loop.record import StepRecorder
from elastic.train.loop.rehearsals import Rehearsals
from elastic.train.loop.step_thread import StepThread
from elastic.train.state import values
from elastic.train.state.flat import checksum_of
from elastic.train.state.restore import ResumePoint
from elastic.train.state.resume import resume
from elastic.train.state.saving import SavedState, Saving
from elastic.train.state.trial_load import load_own_again
from elastic.train.step import derived_weights
from elastic.train.step.balancing import balancing_of, is_held_off
from elastic.train.step.parts import Requests, StepOutcome, StepParts, step_parts
from elastic.train.step.step import Step


class Loop:
    """The training loop of one rank in one generation.

    stopped: where the recipe ended the run early, if it did. digest: of the checkpoint of the last
    step, once it is committed.
    """

    def __init__(self, parts: LoopParts, stopped: StopRecord | None) -> None:
        self.stopped = stopped
        self.digest = ""
        self._parts = parts
        self._progress = LoopProgress()
        self._last: SavedState | None = None  # of that step, if it is new
        self._stop_reason: str | None = None

    def run(self) -> Iterator[Step]:
        """The steps that are left.

        Raises SystemExit at a drain; StoreFailed when the last state cannot be saved.
        """
        self._begin()
        parts, first = self._parts, self._resumed.step + 1
        auditor = step_requests.auditor_of(parts, self._of_steps, self._resumed.step, self._compare_states)
        is_audited = step_requests.is_first_audited(parts, first)
        of_steps = replace(self._of_steps, any_shard=lambda step: parts.loader.shard(step, 0))
        batches = self._batches(first)

        def load(number: int) -> list[Batch]:
            self._thread.computes(number)
            return next(batches)

        for number in range(first, self.last_step + 1):
            witness = self._witness(number, auditor, is_audited=is_audited)
            step = Step(number, of_steps, partial(load, number), self._requests, witness)
            self._open(step)
            yield step
            self._check_body_end(number, first)
            if self._stop_reason is not None:
                self.leave(self._stop_reason)
                return
            self._progress.close(number)
            self._last = self._finish(step)
            is_audited = step.outcome is not None and step.outcome.requests.audit
            self._divide(step)
            if parts.trace is not None and parts.trace.is_over(number):
                parts.page.set_open_step(parts.groups.local_rank, None)
                raise SystemExit(EXIT_COMPLETE)
        self._close()
        self._end()

    def _batches(self, first: int) -> Iterator[list[Batch]]:
        """Of this rank's shards, for each step from `first` on."""
        parts, exchange, output = self._parts, self._of_steps.exchange, self._parts.output
        is_wanted = parts.is_balanced
        if is_wanted and output is not None and parts.groups.world_size > 1:
            is_wanted = not is_held_off(parts.generation, output.events)
        balancing = self._balancing = balancing_of(
            parts.groups,
            exchange,
            is_wanted=is_wanted,
            reads_ahead=parts.loader.reads_ahead(len(exchange.own_shards)),
            log=None if output is None else output.log,
        )
        own, is_dealt_anew = exchange.own_shards, parts.again.earlier.is_dealt_anew
        self._usual = exchange.spans
        if is_dealt_anew:
            exchange.divide(self._usual[::-1], is_reversed=True)

        def shards_of(step: int) -> range:
            if is_dealt_anew and step == first:
                return exchange.own_shards[::-1]
            return own if balancing is None else balancing.own_shards(step)

        return parts.loader.steps_of(shards_of, first, check_first=first == 1)

    def _divide(self, step: Step) -> None:
        """The step is over: which shards each rank has from the next one on."""
        exchange = self._of_steps.exchange
        if exchange.is_reversed:
            exchange.divide(self._usual)
        elif self._balancing is not None:
            self._balancing.end(step)

    def _open(self, step: Step) -> None:
        """Until its first sum the step is the recipe's own code, which may evaluate something."""
        parts = self._parts
        if parts.faults is not None:
            step.fault_point = parts.faults.at_step(step.number)
        if parts.snapshotting is not None:
            parts.snapshotting.copy.before_forward()
        parts.heartbeat.enter(Phase.BETWEEN)
        self._progress.open = step
        self._recorder.open()
        parts.page.set_open_step(parts.groups.local_rank, step.number)

    def _witness(
        self, number: int, auditor: Auditor, *, is_audited: bool
    ) -> Auditor | FirstGradientCheck | None:
        """What `elastic-train check` wants takes the place of an audit."""
        parts = self._parts
        if is_audited and parts.output is not None:
            parts.output.audits.begin(number)
        wanted = None if parts.trace is None else parts.trace.witness_of(number, auditor)
        return wanted or (auditor if is_audited else None)

    def _check_body_end(self, number: int, first: int) -> None:
        refuse.use_in_forked_child()
        refuse.own_signal_handlers()
        self.raise_caught()
        if self._stop_reason is None:
            self._thread.ends(number)
        values.check_all(self._parts.state.objects.values(), number - first)
        if number == first:  # from here on an optimizer has state
            self._parts.state.check_savable()
        if number == 1:
            load_own_again(self._parts.state)

    @property
    def last_step(self) -> int:
        """Of the run, as far as it is known."""
        return self._parts.loader.order.steps if self.stopped is None else self.stopped.step

    @property
    def epochs(self) -> int:
        """That are complete when the run ends."""
        return self._parts.loader.order.position(self.last_step + 1)[0]

    @property
    def groups(self) -> ProcessGroups:
        return self._parts.groups

    @property
    def is_in_step(self) -> bool:
        """Whether the recipe has taken a step and not asked for the next one."""
        return self._progress.open is not None

    @property
    def place(self) -> StepPlace:
        """How far this rank is."""
        return self._progress.place

    @property
    def error_place(self) -> ErrorPlace | None:
        """Where an error is that ends the script now; None while a state is being restored."""
        return self._progress.error_place

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While an evaluation runs: what it changes is not what the loop's body does."""
        step, output = self._progress.open, self._parts.output
        if step is None:
            yield
            return
        self._saving.finish_copy()  # the evaluation may be longer than this node has time
        changed = None if output is None else output.evaluated.add(step.number, ends_epoch=step.ends_epoch)
        if output is not None and changed is not None:
            output.log.record(changed)
        with self._recorder.evaluating(), self._parts.loader.loading():
            yield

    def checksum(self) -> str:
        """Of the whole state, as it is now on this rank."""
        return checksum_of(self._parts.state.flatten()).whole

    def say(self, sentence: str) -> None:
        """Once, on the console."""
        if self._parts.output is not None:
            print(sentence, flush=True)

    def note_error(self, error: ElasticError) -> None:
        """Of a call in the open step's body."""
        if self._progress.open is not None:
            self._progress.open.error = self._progress.open.error or error

    def raise_caught(self) -> None:
        """The recipe caught an error of the open step, which is the end of the run all the same."""
        if self._progress.open is not None and self._progress.open.error is not None:
            raise self._progress.open.error

    def stop(self, reason: str) -> None:
        """End the run after the step whose body runs.

        Raises UsageError outside of a body, and for a reason that is no text.
        """
        self._stop_reason = early_end.reason_line(reason, is_in_step=self._progress.open is not None)

    def leave(self, reason: str) -> None:
        """The recipe has left the body of the open step: the run ends here, on all ranks.

        Raises UsageError where ranks left at different places, and what the end of a run raises.
        """
        step, heartbeat = self._progress.open, self._parts.heartbeat
        assert step is not None
        self._parts.again.refuse_end(step.number)
        heartbeat.enter(Phase.AFTER)  # the others may still evaluate something of their own
        self._close()  # before the groups, which a thread uses
        is_done = step.outcome is not None
        # A rank that leaves the last step after its update ends where all end.
        is_cut = is_done and self._of_steps.contract.has_waiting_gradients()
        if not is_done or is_cut or step.number < self.last_step:
            self._use(agree(self._parts.groups, step.place))
        parts = self._parts
        end = step.number if is_done else step.number - 1
        if not is_done:
            has_same_mark = self._of_steps.contract.has_same_mark()
            step.abandon()
            saved = None if self._last is None else self._last.published
            early_end.check_unchanged(parts, step.number, self._resumed, saved, has_same_mark=has_same_mark)
        heartbeat.enter(Phase.SAVE)
        if end < self.last_step or is_cut:
            reason = (self._stop_reason or reason) + (", before its update" if is_cut else "")
            self.stopped = early_end.stop(parts, reason, end)
        self._progress.close(end)
        if is_done:
            self._last = self._finish(step)
        elif self._last is not None:  # all ranks vote once more; some of them have a snapshot
            self._last = self._saving.keep(self._last.info)
        self._end()

    def _begin(self) -> None:
        parts = self._parts
        self._thread = StepThread()
        # Until the loop has ended, the agent takes an end of this process for a failure, also one
        # with exit code 0.
        parts.page.set_open_step(parts.groups.local_rank, 0)
        resumed = resume(parts, self.stopped, parts.again.look())
        parts.again.restored(resumed.point.step, is_doubtful=resumed.point.divergence is not None)
        derived_weights.compute_again(parts.state.submodules())
        self._resumed: ResumePoint = resumed.point
        self._progress.began_from = resumed.point
        self._agreement = Agreement(
            comparison=parts.comparison,
            page=parts.page,
            snapshotting=parts.snapshotting,
            flatten=parts.state.flatten,
            step=resumed.point.step,
            known=resumed.point.divergence,
        )
        self._agreement.begin()
        self._recorder = StepRecorder(parts, resumed)
        self._saving = Saving(parts, self._agreement, resumed.point)
        if resumed.point.source == "parent":
            self._commit_start()
        self._of_steps: StepParts = step_parts(
            parts.state,
            parts.loader.order,
            parts.groups,
            parts.heartbeat,
            self._agreement,
            parts.again.collected,
        )
        self._recorder.begin(self._of_steps.contract)

    def _commit_start(self) -> None:
        """Make the state that came from another run this run's own, so that the parent may go."""
        self._parts.heartbeat.enter(Phase.SAVE)
        problem = self._saving.commit(self._saving.keep(self._recorder.info(0, 0, None)), tries=1)
        if problem:
            self.say(
                f"the state that this run begins from is not saved: {problem}; keep the other run until this one has a checkpoint"
            )

    def _use(self, groups: ProcessGroups) -> None:
        """Fresh groups of the same ranks take the place of those that were closed."""
        self._parts = replace(self._parts, groups=groups)
        self._saving.parts = self._parts

    def _compare_states(self) -> None:
        """Before the update of the open step: all ranks had the same state after the one before.

        Raises StatesDiffer or RecipeNotExact on every rank if they had not.
        """
        self._of_steps.buffers.load()  # the step may have changed them already
        if self._last is not None:  # in its first step a generation has just compared them
            self._saving.keep(self._last.info, copies=False)
            self._agreement.compare()

    def _requests(self, number: int) -> Requests:
        parts = self._parts
        if parts.snapshotting is not None:
            parts.snapshotting.copy.before_update()
        return step_requests.requests_of(parts, self._saving, number, self.last_step)

    def _finish(self, step: Step) -> SavedState:
        """After the recipe's optimizer: leave behind what the step leaves behind, in order."""
        parts, saving = self._parts, self._saving
        outcome = step.outcome or step.end_by_hand()
        if note := self._of_steps.contract.end_step():
            self.say(note)
        step.fault_point("optimizer")
        derived_weights.compute_again(self._of_steps.contract.modules())
        saving.after_update()
        if step.number == 1:
            self._say_notes(step)
        requests, evidence = self._proved(step, outcome)
        info = self._recorder.record(step, outcome, parts.groups)
        is_last = step.number == self.last_step
        saved = SavedState(info=info, published=None)
        if is_last or any(requests._replace(audit=False)):
            saved = self._keep(step, info, requests, ends=requests.drain or is_last)
        parts.page.set_step(parts.groups.local_rank, step.number)
        if requests.drain and not is_last:
            if evidence is not None:
                parts.again.leave(evidence)
                parts.page.rehearses = parts.again.is_rehearsal
            saving.drain(saved)
        elif requests.save and not is_last:
            saving.offer(saved)
        parts.heartbeat.finish_step()
        parts.heartbeat.enter(Phase.BETWEEN)
        return saved

    def _keep(self, step: Step, info: SnapshotInfo, requests: Requests, *, ends: bool) -> SavedState:
        """Vote for the state after the step, and take the snapshot that is asked for."""
        parts = self._parts
        parts.heartbeat.enter(Phase.SAVE)
        copies = ends or requests.snapshot or requests.save
        if copies:
            self._of_steps.contract.check_kept()
        wait = ends or requests.save or parts.again.closing > step.number
        saved = self._saving.keep(info, copies=copies, wait=wait, patient=ends)
        if copies:
            step.fault_point("after-snapshot")
        return saved

    def _proved(self, step: Step, outcome: StepOutcome) -> tuple[Requests, Evidence | None]:
        """What remains to be done of what ranks ask for, and the evidence of a last step.

        A generation that ends as planned ends one step later, with the states before and after that
        step in memory, so that the next one can do the step again. Raises SystemExit or
        RecipeNotExact where this step was done again and differs.
        """
        again, asked = self._parts.again, outcome.requests
        requests = asked
        if asked.rehearse or asked.at_once:
            requests = asked._replace(rehearse=False, at_once=False)
        if not again.is_on or step.number == self.last_step:
            return requests, None
        if again.earlier.found:
            self._compare_again(step, outcome)
        elif again.closing:
            again.closing = 0
            # The votes on the state before rode in this step's sum: every node keeps it.
            if self._agreement.kept_step == step.number - 1:
                again.is_rehearsal &= not asked.drain
                return requests._replace(drain=True), self._evidence(step, outcome)
        elif asked.rehearse or (asked.drain and not asked.at_once):
            return self._close_later(step, requests), None
        return requests, None

    def _compare_again(self, step: Step, outcome: StepOutcome) -> None:
        done = self._parts.again.compare(self._evidence(step, outcome))
        if self._rehearsals is not None:
            self._rehearsals.compared(done)

    def _close_later(self, step: Step, requests: Requests) -> Requests:
        """Whatever was asked for is done after the next step."""
        again, closing = self._parts.again, step.number + 1
        if closing >= self.last_step:
            return requests
        is_rehearsal, is_dealt_anew = not requests.drain, False
        if is_rehearsal and self._rehearsals is not None:
            self._rehearsals.asked(closing)
            is_dealt_anew = self._rehearsals.deals_anew
        again.close_after(closing, is_rehearsal=is_rehearsal, is_dealt_anew=is_dealt_anew)
        return requests._replace(drain=False, snapshot=True)

    @property
    def _rehearsals(self) -> Rehearsals | None:
        return None if self._parts.output is None else self._parts.output.rehearsals

    def _evidence(self, step: Step, outcome: StepOutcome) -> Evidence:
        parts = self._parts
        found = variables_of(sys._getframe())  # noqa: SLF001 - the recipe's frame is above
        variables = texts_of(found, parts.state, parts.loader.dataset, parts.clock)
        return parts.again.end(step.number, parts.state.flatten(), step.logged, outcome.loss, variables)

    def _say_notes(self, step: Step) -> None:
        found = notes(self._parts.state, list(dict.fromkeys(step.averaged)), step.shards)
        if not self._parts.commits_drains:  # an agent does
            found += refuse.kept_signal_handlers()
        for note in found:
            self.say(note)
            if self._parts.trace is not None:
                self._parts.trace.note(note)

    def _close(self) -> None:
        self._of_steps.gradients.close()
        self._of_steps.contract.close()

    def _end(self) -> None:
        """Commit the state of the last step, if it is not committed."""
        parts, resumed, last = self._parts, self._resumed, self._last
        derived_weights.compute_again(parts.state.submodules(), with_graph=False)
        parts.heartbeat.enter(Phase.SAVE)
        if parts.output is not None:
            events, generation = parts.output.events, parts.output.log.generation
            if failed := parts.step_functions.told_at_the_end(events, generation):
                self.say(failed)
        self.digest = resumed.digest
        if last is None and resumed.source != "checkpoint":  # the last step's state was in memory
            epoch = parts.loader.order.position(resumed.step)[0] if resumed.step else 0
            last = self._saving.keep(self._recorder.info(resumed.step, epoch, resumed.line))
        if last is not None:
            problem = self._saving.commit(last)
            if problem:
                raise StoreFailed(
                    f"trained to the last step, {last.info.step}, which could not be saved: {problem}"
                )
            if self._saving.checkpointing is not None:
                self.digest = self._saving.checkpointing.digest
        if self.stopped is not None and parts.output is not None:
            ended = self.stopped
            parts.output.log.record(Stopped(step=ended.step, steps=ended.steps, reason=ended.reason))
        parts.page.set_open_step(parts.groups.local_rank, None)
        parts.heartbeat.enter(Phase.AFTER)
