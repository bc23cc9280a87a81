"""An early end is written down before its state, and its state is that of a step.

Both must hold whatever was saved on the way, or the end would depend on the rhythm of saves.
"""

from elastic.checkpoint import stop_record
from elastic.checkpoint.stop_record import StopRecord
from elastic.errors import StoreFailed, UsageError
from elastic.snapshot import image
from elastic.train.loop.parts import LoopParts
from elastic.train.state.flat import FlatState, checksum_of
from elastic.train.state.restore import ResumePoint
from elastic.train.state.snapshotting import PublishedSnapshot

REASON_LIMIT = 500


def reason_line(reason: object, *, is_in_step: bool) -> str:
    """What the recipe gave as the reason, as one line: it becomes a part of lines.

    Raises UsageError outside of a body, and for a reason that is no text.
    """
    if not isinstance(reason, str):
        raise UsageError(f"expected run.stop(reason), a text that says why, found {type(reason).__name__}")
    if not is_in_step:
        raise UsageError("expected run.stop(reason) in the body of the loop over run.steps, found it outside")
    line = " ".join(reason.split())
    cut = line if len(line) <= REASON_LIMIT else f"{line[: REASON_LIMIT - 3]}..."
    return cut or "run.stop"


def stop(parts: LoopParts, reason: str, step: int) -> StopRecord:
    """Write down that no step follows this one, before any state of it can be loaded.

    Raises StoreFailed on every rank; UsageError on rank 0 where the run ended at another step
    before.
    """
    stopped = StopRecord(run_id=parts.run_id, step=step, steps=parts.loader.order.steps, reason=reason)
    problem = ""
    if parts.output is not None:
        try:
            stop_record.create(parts.output.store, stopped, parts.clock)
        except StoreFailed as error:
            problem = str(error)
    problem = parts.groups.from_rank0(problem)
    if problem:
        raise StoreFailed(f"the run was {stopped}, which could not be written down: {problem}")
    return stopped


def check_unchanged(
    parts: LoopParts,
    number: int,
    resumed: ResumePoint,
    published: PublishedSnapshot | None,
    *,
    has_same_mark: bool,
) -> None:
    """The recipe left step `number` before its gradients: the state is to be that before the step.

    It is compared with what was restored, if that was the step before, or with the snapshot of that
    step while a slot still holds it; and by its parameters' versions, which need neither. Raises
    UsageError on every rank where one of them has another state.
    """
    is_changed = not has_same_mark
    if not is_changed:
        now = checksum_of(parts.state.flatten())
        if resumed.step == number - 1:
            is_changed = now.whole != resumed.checksum
        elif published is not None and published.is_there:
            tensors, document = image.read(published.body, copy=False)
            is_changed = now != checksum_of(FlatState.read(tensors, document))
    if any(parts.groups.all_gather(is_changed)):
        raise UsageError(
            f"the recipe left the loop in step {number} before its gradients, and had changed the state in it. Expected the state "
            f"of step {number - 1}: leave the loop before the change, or after the gradients of step {number}"
        )
