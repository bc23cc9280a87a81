"""What ranks ask for at the end of a step, and what of it is done after that step.

Each rank says what it asks for: a drain, a snapshot, a save, a comparison of the ranks' states, an
audit or a rehearsal of the next step. The sum at the end of the step tells all of them, and what
any rank asked for is done by all. A generation's first step has no step before it: rank 0 decides
its audit.

A generation that ends as planned ends one step later, with the states before and after that step in
memory, so that the next one can do the step again.
"""

import sys

from elastic.proof.agreement import Agreement
from elastic.proof.evidence import ComputedStep
from elastic.proof.step_again import texts_of
from elastic.proof.variables import variables_of
from elastic.train.loop.build import LoopParts
from elastic.train.state.saving import Saving
from elastic.train.step.parts import NOTHING, Requests, StepOutcome
from elastic.train.step.step import Step

LONGEST_STEP_S = 5.0  # a node that is to leave, or to join, waits for one step more


QUIET_S = 0.02  # what seconds and costs decide may come so much later


class Asking:
    """What one rank asks for in each step. In most steps that is one comparison of a number."""

    def __init__(self, parts: LoopParts, saving: Saving) -> None:
        self._parts, self._saving = parts, saving
        # But for drains it asks for nothing before this step and this time. All computations of a
        # step ask the same: the last one counts.
        self._quiet_until, self._quiet_until_s, self._asked = 0, 0.0, 0

    def ask(self, number: int, now_s: float, last_step: int) -> Requests:
        """At the end of step `number`."""
        is_quiet = number < self._quiet_until and now_s < self._quiet_until_s and number != self._asked
        if is_quiet and not self._parts.page.drain:
            return NOTHING
        self._asked = number
        self._quiet_until_s = now_s + QUIET_S
        self._quiet_until = quiet_until(self._parts, self._saving, number, last_step)
        return requests_of(self._parts, self._saving, number, last_step)


def quiet_until(parts: LoopParts, saving: Saving, number: int, last_step: int) -> int:
    """The first step after `number` whose number may make something due."""
    options, uploads = parts.link.options, saving.checkpointing is not None and saving.checkpointing.is_busy
    # Snapshots of every n steps are counted from the last one; a check and a redo ask in each step.
    asks_in_each = options.snapshot_every.kind == "steps" or parts.trace is not None
    if asks_in_each or uploads or saving.agreement.known is not None:
        return 0
    due = [last_step, parts.loader.order.epoch_end(number + 1) - 1]  # before an evaluation
    # An audit or a rehearsal is asked for in the step before.
    for every, ahead in ((options.save_every, 0), (options.audit, 1), (options.rehearse, 1)):
        if every.kind == "steps":
            due.append(every.next_step(number + 1 + ahead) - ahead)
    return min(due)


def requests_of(parts: LoopParts, saving: Saving, number: int, last_step: int) -> Requests:
    """What this rank asks for at the end of step `number`."""
    output, page, checkpointing = parts.output, parts.page, saving.checkpointing
    drain = page.drain or (parts.trace is not None and parts.trace.drains(number))
    at_once = drain and page.drains_at_once
    if output is None and checkpointing is not None:  # nothing below asks for it
        checkpointing.receive_result()
    if output is None or checkpointing is None or number == last_step:
        return Requests(drain=drain, snapshot=False, save=False, at_once=at_once)
    snapshot = output.schedule.is_due(number, evaluates_next=parts.loader.order.ends_epoch(number + 1))
    save = checkpointing.is_due(number)
    rehearse = False
    if output.rehearsals is not None and not (drain or parts.again.earlier.found or parts.again.closing):
        rehearse = output.rehearsals.is_due(number + 1)
    is_due = parts.groups.world_size > 1 and output.comparing.is_over(number)
    return Requests(
        drain=drain,
        snapshot=snapshot,
        save=save,
        compare=snapshot or save or is_due or saving.agreement.is_wanted(number),
        audit=output.audits.is_due(number + 1),
        rehearse=rehearse,
        at_once=at_once or output.schedule.last_step_s > LONGEST_STEP_S,
    )


def is_first_audited(parts: LoopParts, step: int) -> bool:
    """Whether a generation's first step is audited. Later ones learn it from the step before."""
    output, ended_by = parts.output, parts.link.divergence
    # This step's audit, before a restart.
    failed = ended_by is not None and bool(ended_by.at_fault) and ended_by.step == step
    is_due = output is not None and (failed or output.audits.is_due(step, is_first=True))
    return parts.groups.from_rank0(is_due)


def act_on_requests(
    parts: LoopParts, agreement: Agreement, step: Step, outcome: StepOutcome, last_step: int
) -> Requests:
    """Leave or compare evidence as they ask; returns what is left to do after this step.

    outcome: of a step for which ranks have asked something, or that is part of a comparison.

    Raises SystemExit or RecipeNotExact where this step was done again and differs.
    """
    again, asked, number = parts.again, outcome.requests, step.number
    if not again.is_on or number == last_step:
        return asked
    rehearsals = None if parts.output is None else parts.output.rehearsals
    if again.earlier.found:
        done = again.compare(_evidence(parts, step, outcome))
        if rehearsals is not None:
            rehearsals.compared(done)
    elif again.closing:
        again.closing = 0
        # The votes on the step before were part of this step's sum, and tell who keeps that state.
        if agreement.kept_step == number - 1:
            again.is_rehearsal &= not asked.drain
            is_left = again.leave(_evidence(parts, step, outcome))
            parts.page.rehearses = is_left and again.is_rehearsal
            return asked._replace(drain=is_left or asked.drain)
    elif (asked.rehearse or (asked.drain and not asked.at_once)) and number + 1 < last_step:
        is_rehearsal = not asked.drain
        is_dealt_anew = is_rehearsal and rehearsals is not None and rehearsals.asked(number + 1)
        again.close_after(number + 1, is_rehearsal=is_rehearsal, is_dealt_anew=is_dealt_anew)
        # The drain or rehearsal comes after the next step.
        return asked._replace(drain=False, snapshot=True)
    return asked


def _evidence(parts: LoopParts, step: Step, outcome: StepOutcome) -> ComputedStep:
    found = variables_of(sys._getframe())  # noqa: SLF001 - the recipe's frame is above
    variables = texts_of(found, parts.state, parts.loader.dataset)
    return parts.again.end(step.number, parts.state.evidence(), step.logged, outcome.loss, variables)
