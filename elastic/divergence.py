"""Ranks whose states differ share one thing: their knowledge of the difference.

The workers that find a difference leave it to their agents, and those hand it to the next workers,
who do the steps again. Whether they agree then tells the two causes apart: a machine that was wrong
once, or a recipe whose result depends on more than its inputs. The judgement is a function of the
votes of both times.

It does not name a machine that is wrong in the same way each time: that looks like a recipe. And a
recipe that keeps something in its processes agrees the second time, in new processes: what comes
again as many steps after the beginning may be either, and no machine is named.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A difference between the ranks' states.

    step: the first step after which it was found. agreed: the last one before, after which all
    ranks had the same state; 0 is the start. entry: the first entry of the state that differs, if
    it was found. votes, nodes: the checksum of each rank's state after `step`, and its node, in
    rank order. at_fault: the nodes that were wrong, where an audit has shown it; otherwise the
    second time shows it. began: the step with whose state the generation began.
    """

    generation: int
    step: int
    agreed: int
    entry: str
    votes: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    at_fault: tuple[str, ...] = ()
    began: int = 0


def vote_of(checksum: str) -> int:
    """63 bits of a checksum in hexadecimal: a word of shared memory, and exact as two floats."""
    return int(checksum[:16], 16) >> 1


def nodes_at_fault(found: Divergence, second_vote: int | None) -> tuple[str, ...]:
    """The nodes that were wrong, now that the ranks agree on `second_vote` after the same step.

    second_vote: None where it is not known. If no rank had that state the first time, because the
    error reached all ranks through the sums of the steps since, those are to blame whose state
    differs from that of most ranks; without a majority, every node may have been wrong.
    """
    if found.at_fault or not found.votes:
        return found.at_fault
    most_common, count = Counter(found.votes).most_common(1)[0]
    right = (
        second_vote if second_vote in found.votes else most_common if 2 * count > len(found.votes) else None
    )
    wrong = (node for vote, node in zip(found.votes, found.nodes, strict=True) if vote != right)
    return tuple(dict.fromkeys(wrong))


def is_repeated(before: Divergence | None, step: int) -> bool:
    """Whether a difference after `step` shows a recipe that cannot be exact.

    before: the difference for which the steps are done again. A new difference in a later
    step is another event.
    """
    return before is not None and not before.at_fault and step <= before.step


def may_come_as_late(before: Divergence | None, *, began: int, agreed: int, step: int) -> bool:
    """Whether a new difference may have come as many steps after a beginning as the one before.

    It came after `agreed`, and no later than `step`, in a generation that began with the state of
    `began`.
    """
    if before is None:
        return False
    return agreed - began < before.step - before.began and before.agreed - before.began < step - began
