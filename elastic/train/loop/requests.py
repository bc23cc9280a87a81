"""What is asked for at the end of a step: a drain, a snapshot, a save, a comparison of the ranks'
states, and an audit of the next step.

Each rank says what it asks for; the sum at the end of the step tells all of them, and what any rank
asked for is done by all. A generation's first step has no step before it: rank 0 decides its audit.
"""

from collections.abc import Callable

from elastic.proof.audit import Auditor
from elastic.train.loop.parts import LoopParts
from elastic.train.state.saving import Saving
from elastic.train.step.parts import Requests, StepParts

LONGEST_STEP_S = 5.0  # a node that is to leave, or to join, waits for one step more


def requests_of(parts: LoopParts, saving: Saving, number: int, last_step: int) -> Requests:
    """What this rank asks for at the end of step `number`."""
    output, page, checkpointing = parts.output, parts.page, saving.checkpointing
    drain = page.drains_after(number) or (parts.trace is not None and parts.trace.wants_drain(number))
    at_once = drain and page.drains_at_once
    if output is None or checkpointing is None or number == last_step:
        return Requests(drain=drain, snapshot=False, save=False, compare=False, at_once=at_once)
    ends_epoch = parts.loader.order.ends_epoch(number + 1)
    evaluates_next = output.evaluated.is_expected(number + 1, ends_epoch=ends_epoch)
    snapshot = output.schedule.is_due(number, evaluates_next=evaluates_next)
    save = checkpointing.is_due(number)
    is_busy = drain or bool(parts.again.earlier.found) or parts.again.closing > 0
    rehearsals, rehearse = None if is_busy else output.rehearsals, False
    if (snapshot or save) and parts.snapshotting is not None and parts.snapshotting.is_waiting():
        snapshot = save = False  # due until there is memory
    elif rehearsals is not None:
        rehearse = rehearsals.is_due(number + 1)
    is_due = parts.groups.world_size > 1 and output.comparing.is_due(number)
    compare = snapshot or save or is_due or saving.agreement.is_wanted(number)
    audit = output.audits.is_due(number + 1)
    at_once = at_once or output.schedule.last_step_s > LONGEST_STEP_S
    return Requests(
        drain=drain,
        snapshot=snapshot,
        save=save,
        compare=compare,
        audit=audit,
        rehearse=rehearse,
        at_once=at_once,
    )


def is_first_audited(parts: LoopParts, step: int) -> bool:
    """Whether a generation's first step is audited. Later ones learn it from the step before."""
    output, redo = parts.output, parts.redo
    failed = redo is not None and bool(redo.at_fault) and redo.step == step  # its audit, before
    is_due = output is not None and (failed or output.audits.is_due(step, is_first=True))
    return parts.groups.from_rank0(is_due)


def auditor_of(parts: LoopParts, of_steps: StepParts, began: int, compare: Callable[[], None]) -> Auditor:
    """began: the step with whose state the generation began.

    compare: raises where the ranks had other states before the open step.
    """
    return Auditor(
        groups=parts.groups,
        exchange=of_steps.exchange,
        loader=parts.loader,
        state=parts.state,
        buffers=of_steps.buffers,
        gradients=of_steps.gradients,
        heartbeat=parts.heartbeat,
        clock=parts.clock,
        node=parts.node,
        generation=parts.generation,
        compare=compare,
        redo=parts.redo,
        began=began,
        log=None if parts.output is None else parts.output.log,
    )
