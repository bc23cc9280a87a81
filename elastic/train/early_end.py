"""An early end is written down before its state, and its state is that of a step.

Both must hold whatever was saved on the way, or the end would depend on the rhythm of saves.
"""

from elastic.checkpoint import stop_record
from elastic.checkpoint.stop_record import StopRecord
from elastic.errors import StoreFailed, UsageError
from elastic.snapshot import image
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.train.flat_state import FlatState, checksum_of
from elastic.train.process_groups import ProcessGroups
from elastic.train.restore import ResumePoint
from elastic.train.snapshotting import PublishedSnapshot
from elastic.train.state import State


def write_down(stopped: StopRecord, groups: ProcessGroups, store: Store | None, clock: Clock) -> None:
    """Before any state of its step can be loaded: it must be known that no step follows.

    store: of the run directory, on rank 0 alone. Raises StoreFailed on every rank; UsageError on
    rank 0 where the run ended at another step before.
    """
    problem = ""
    if store is not None:
        try:
            stop_record.create(store, stopped, clock)
        except StoreFailed as error:
            problem = str(error)
    problem = groups.from_rank0(problem)
    if problem:
        raise StoreFailed(f"the run was {stopped}, which could not be written down: {problem}")


def check_unchanged(
    state: State,
    number: int,
    resumed: ResumePoint,
    published: PublishedSnapshot | None,
    *,
    has_same_mark: bool,
    groups: ProcessGroups,
) -> None:
    """The recipe left step `number` before its gradients: the state is to be that before the step.

    It is compared with what was restored, if that was the step before, or with the snapshot of that
    step while a slot still holds it; and by its mark, which needs neither (state_mark.py). Raises
    UsageError on every rank where one of them has another state.
    """
    is_changed = not has_same_mark
    if not is_changed:
        now = checksum_of(state.flatten())
        if resumed.step == number - 1:
            is_changed = now.whole != resumed.checksum
        elif published is not None and published.is_there:
            tensors, document = image.read(published.body, copy=False)
            is_changed = now != checksum_of(FlatState.read(tensors, document))
    if any(groups.all_gather(is_changed)):
        raise UsageError(
            f"the recipe left the loop in step {number} before its gradients, and had changed the state in it. Expected the state "
            f"of step {number - 1}: leave the loop before the change, or after the gradients of step {number}"
        )
