"""Ranks leave the loop at the same place, or are told that they did not; none waits for ever.

A rank that leaves while another goes on would wait for it, and the other one for the leaver in its
next sum. So the leaver writes its place into the store of the generation, closes its process
groups, which ends every wait for it, and meets the ranks that left too in fresh groups. A rank
whose wait ended that way looks into the store: if another rank left at a place that it has passed
itself, that is the reason, and no peer died.

An early end is written down before its state, and its state is that of a step. Both must hold
whatever was saved on the way, or the end would depend on the rhythm of saves.

Closing a group may not end the waits of others with nccl, or where a child of the leaver lives on
that inherited its connections; the agent then takes them for a hang.
"""

import json

from elastic.checkpoint import stop_record
from elastic.errors import StoreFailed, UsageError
from elastic.snapshot.image import LiveChecksum
from elastic.train.groups import ProcessGroups
from elastic.train.loop.build import LoopParts
from elastic.train.state.restore import ResumePoint
from elastic.train.state.saving import SavedState
from elastic.train.state.snapshotting import layout_of
from elastic.train.step.parts import StepPlace

KEEPS_S = 300.0  # the others may evaluate, or write a file, before they leave
_ADVICE = (
    "All ranks must leave it in the same step: decide by values that are the same on each of them, such as step.number, "
    "the loss that step.mean_loss returns, run.evaluate or elastic.Values, and not by run.rank, a clock or a rank's own data"
)


def agree(groups: ProcessGroups, place: StepPlace, *, keeps: bool) -> ProcessGroups:
    """Wait until all ranks have left the loop; returns their fresh groups, which replace `groups`.

    keeps: the same ones, which sharded modules use; their waits end with this process alone.
    No thread of this process may be using the groups. Raises UsageError on every rank unless they
    left at the same place, PeerLost.
    """
    groups.tell("left", json.dumps(place))
    if keeps and not groups.have_told("left", KEEPS_S):
        raise UsageError(
            f"rank {groups.rank} left the loop {place}, and not all others did within {KEEPS_S:.0f} s. {_ADVICE}"
        )
    fresh = groups if keeps else groups.reopened("left")
    places = [StepPlace(*each) for each in fresh.all_gather(place)]
    if len(set(places)) > 1:
        listed = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
        raise UsageError(f"the ranks left the loop at different places ({listed}). {_ADVICE}")
    return fresh


def explain_loss(groups: ProcessGroups, place: StepPlace) -> UsageError | None:
    """The reason for the loss of a peer, if another rank left the loop and this one went on.

    place: that of this rank, unless it left too.
    """
    texts = [groups.told(f"left/{rank}") for rank in range(groups.world_size)]
    left = [None if text is None else StepPlace(*json.loads(text)) for text in texts]
    mine = left[groups.rank] or place
    for rank, theirs in enumerate(left):
        if theirs is not None and theirs < mine:
            return UsageError(
                f"rank {rank} left the loop {theirs}, and rank {groups.rank} did not (it is {mine}). {_ADVICE}"
            )
    return None


def stop(parts: LoopParts, reason: str, step: int) -> stop_record.StopRecord:
    """Write down that no step follows this one, before any state of it can be loaded.

    Raises StoreFailed on every rank; UsageError on rank 0 where the run ended at another step
    before.
    """
    steps, problem = parts.loader.order.steps, ""
    stopped = stop_record.StopRecord(run_id=parts.identity.run_id, step=step, steps=steps, reason=reason)
    if parts.output is not None:
        try:
            stop_record.create(parts.store, stopped, parts.clock)
        except StoreFailed as error:
            problem = str(error)
    if problem := parts.groups.from_rank0(problem):
        raise StoreFailed(f"the run was {stopped}, which could not be written down: {problem}")
    return stopped


def check_unchanged(
    parts: LoopParts, number: int, resumed: ResumePoint, last: SavedState | None, *, has_same_mark: bool
) -> None:
    """The recipe left step `number` before its gradients: the state is to be that before the step.

    It is compared with what was restored, if that was the step before, or with the snapshot of that
    step (`last`), if it has one; and by its parameters' versions, which need neither. Raises
    UsageError on every rank where one of them has another state.
    """
    is_changed, state = not has_same_mark, parts.state
    if resumed.step == number - 1:
        is_changed |= state.evidence().whole != resumed.checksum
    elif last is not None:  # on every rank, whose copy one of its node has
        if state.sharded is None:
            now = LiveChecksum(layout_of(state.flatten(), last.info)).hexdigest()
        else:
            now = state.evidence().whole
        is_changed |= last.published is not None and now != last.published.snapshot.info.checksum
    if any(parts.groups.all_gather(is_changed)):
        raise UsageError(
            f"the recipe left the loop in step {number} before its gradients, and had changed the state in it. Expected the state "
            f"of step {number - 1}: leave the loop before the change, or after the gradients of step {number}"
        )
