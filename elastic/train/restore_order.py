"""The newest state that any node has wins, in memory or in storage alike.

The order is a function of what the ranks report as available. Snapshots of one step that should be
equal and are not are all refused: nothing says which of them is right. A state from which training
never made a new step gives way to the next older one.

It does not load anything: a candidate that turns out not to load makes way for the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.checkpoint.record import CommitRecord

RESTORES_OF_ONE_STATE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedState:
    """A snapshot, or in storage a checkpoint, that must not be used."""

    step: int
    reason: str
    is_stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableStates:
    """What one rank can restore from.

    failures: consecutive failures without a new step, SIGKILLs excluded, as its agent counts them;
    0 on a node that just joined. snapshot_step, snapshot_checksum: of the one in its node's memory,
    None without one. records: the storage's commit records, newest first, on rank 0 alone. damaged:
    those that cannot be used.
    """

    failures: int = 0
    snapshot_step: int | None = None
    snapshot_checksum: str | None = None
    records: tuple[CommitRecord, ...] = ()
    damaged: tuple[RejectedState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A state that training may resume from. `ranks` have it; record: None for a snapshot."""

    step: int
    ranks: tuple[int, ...]
    record: CommitRecord | None = None

    @property
    def is_stored(self) -> bool:
        return self.record is not None


def order_candidates(
    available: Sequence[AvailableStates],
) -> tuple[list[Candidate], list[RejectedState]]:
    """(what to try, best first; what is refused), from what each rank has, in rank order.

    A state that was restored three times without a new step may itself be the cause of the
    failures, so it is skipped in favour of the next older one, and so on. The agent that counted
    the most failures decides. The oldest state is never skipped: a start from the seed would lose
    the run silently, and `--max-restarts` bounds the attempts.
    """
    candidates, rejected = _snapshots(available)
    for of_rank in available:
        rejected += of_rank.damaged
        candidates += [Candidate(step=each.step, ranks=(0,), record=each) for each in of_rank.records]
    # Of two at the same step the one in memory is nearer. The sort is stable, so records of one
    # step keep the storage's order (the latest replacement first).
    candidates.sort(key=lambda each: (-each.step, each.is_stored))
    steps = sorted({each.step for each in candidates}, reverse=True)
    failures = max(of_rank.failures for of_rank in available)
    num_skipped = min(max(0, failures - 1) // RESTORES_OF_ONE_STATE, max(0, len(steps) - 1))
    skipped = steps[:num_skipped]
    rejected += [
        RejectedState(
            step=each.step,
            reason=f"it was restored {RESTORES_OF_ONE_STATE} times and no new step followed",
            is_stored=each.is_stored,
        )
        for each in candidates
        if each.step in skipped
    ]
    return [each for each in candidates if each.step not in skipped], rejected


def _snapshots(available: Sequence[AvailableStates]) -> tuple[list[Candidate], list[RejectedState]]:
    """One candidate per step whose snapshots are all equal; the others are rejected."""
    holders: dict[int, dict[str, list[int]]] = {}
    for rank, of_rank in enumerate(available):
        if of_rank.snapshot_step is not None and of_rank.snapshot_checksum is not None:
            at_step = holders.setdefault(of_rank.snapshot_step, {})
            at_step.setdefault(of_rank.snapshot_checksum, []).append(rank)
    candidates, rejected = [], []
    for step, by_checksum in holders.items():
        if len(by_checksum) == 1:
            (ranks,) = by_checksum.values()
            candidates.append(Candidate(step=step, ranks=tuple(ranks)))
            continue
        groups = " | ".join(", ".join(map(str, ranks)) for ranks in by_checksum.values())
        reason = (
            f"the nodes' snapshots of it differ (ranks {groups}); the memory or the arithmetic of one of these "
            "machines is faulty"
        )
        rejected.append(RejectedState(step=step, reason=reason, is_stored=False))
    return candidates, rejected
