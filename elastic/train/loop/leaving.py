"""Ranks leave the loop at the same place, or are told that they did not; none waits for ever.

A rank that leaves while another goes on would wait for it, and the other one for the leaver in its
next sum. So the leaver writes its place into the store of the generation, closes its process
groups, which ends every wait for it, and meets the ranks that left too in fresh groups. A rank
whose wait ended that way looks into the store: if another rank left at a place that it has passed
itself, that is the reason, and no peer died.

With nccl, closing a group may not end the waits of others; the agent then takes them for a hang.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from elastic.errors import UsageError
from elastic.system.untrusted import Count, decode
from elastic.train.groups import ProcessGroups

_ADVICE = (
    "All ranks must leave it in the same step: decide by what is the same on each of them, such as step.number, "
    "the loss that step.mean_loss returns, run.evaluate or elastic.Values, and not by run.rank, a clock or a rank's own data"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepPlace:
    """How far a rank is in the loop; a later place is greater.

    step: the one whose body runs. passes: how often a function of it was computed over the shards.
    computed: its gradients are known.
    """

    step: Count
    passes: Count
    computed: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"in step {self.step}, {'after' if self.computed else 'before'} its gradients"


def agree(groups: ProcessGroups, place: StepPlace) -> ProcessGroups:
    """Wait until all ranks have left the loop; returns their fresh groups, which replace `groups`.

    No thread of this process may be using the groups. Raises UsageError on every rank unless they
    left at the same place, PeerLost.
    """
    groups.tell(f"left/{groups.rank}", place.to_json())
    fresh = groups.reopened("left")
    places = fresh.all_gather(place)
    if len(set(places)) > 1:
        raise UsageError(f"the ranks left the loop at different places ({_listed(places)}). {_ADVICE}")
    return fresh


def explain_loss(groups: ProcessGroups, place: StepPlace) -> UsageError | None:
    """What is behind the loss of a peer, if another rank left the loop and this one went on.

    place: that of this rank.
    """
    for rank in range(groups.world_size):
        text = groups.told(f"left/{rank}") if rank != groups.rank else None
        left = None if text is None else decode(StepPlace, text.encode(), what="a rank's place")
        if left is not None and left < place:
            return UsageError(
                f"rank {rank} left the loop {left}, and rank {groups.rank} did not (it is {place}). {_ADVICE}"
            )
    return None


def _listed(places: Sequence[StepPlace]) -> str:
    return "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
