"""The newest state that anybody has wins, in memory or in storage alike; states that should be the same and are not are refused, all of them.

A function of what the ranks say that they have. It does not load anything: a candidate that turns out not to load makes way for the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

RESTORES_OF_ONE_STATE = 3


class Tier(Enum):
    MEMORY = "memory"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableStates:
    """What one rank has: a whole snapshot in its node's memory, and, on rank 0 alone, the commit records of the storage, newest first.

    `damaged`: (step, reason) of commit records that cannot be read.
    """

    step: int | None = None
    checksum: str | None = None
    records: tuple[dict[str, Any], ...] = ()
    damaged: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A state that training may go on from; `ranks` have it, `record` is the storage's."""

    step: int
    tier: Tier
    ranks: tuple[int, ...]
    checksum: str | None = None
    record: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedState:
    step: int
    tier: Tier
    reason: str


def order_candidates(
    claims: Sequence[AvailableStates], failures: int
) -> tuple[list[Candidate], list[RejectedState]]:
    """(what to try, best first; what is refused), from every rank's claim, in rank order.

    failures: consecutive ones without a new step, kills from outside aside. A state that was restored three times without one is poison: the next older one is tried, and so on;
    the oldest is never passed over, and the number of restarts is somebody else's limit.
    """
    candidates, rejected = _snapshots(claims)
    for claim in claims:
        rejected += [
            RejectedState(step=step, tier=Tier.STORAGE, reason=reason) for step, reason in claim.damaged
        ]
        candidates += [
            Candidate(step=record["step"], tier=Tier.STORAGE, ranks=(0,), record=record)
            for record in claim.records
        ]
    # Of two at the same step the one in memory is nearer. The sort is stable: records of one step keep the storage's order.
    candidates.sort(key=lambda each: (-each.step, each.tier is Tier.STORAGE))
    steps = sorted({each.step for each in candidates}, reverse=True)
    poison = steps[: min(max(0, failures - 1) // RESTORES_OF_ONE_STATE, len(steps) - 1)] if steps else []
    rejected += [
        RejectedState(
            step=each.step,
            tier=each.tier,
            reason=f"it was restored {RESTORES_OF_ONE_STATE} times and no new step followed",
        )
        for each in candidates
        if each.step in poison
    ]
    return [each for each in candidates if each.step not in poison], rejected


def _snapshots(claims: Sequence[AvailableStates]) -> tuple[list[Candidate], list[RejectedState]]:
    holders: dict[int, dict[str, list[int]]] = {}
    for rank, claim in enumerate(claims):
        if claim.step is not None and claim.checksum is not None:
            holders.setdefault(claim.step, {}).setdefault(claim.checksum, []).append(rank)
    candidates, rejected = [], []
    for step, by_checksum in holders.items():
        if len(by_checksum) == 1:
            ((checksum, ranks),) = by_checksum.items()
            candidates.append(Candidate(step=step, tier=Tier.MEMORY, ranks=tuple(ranks), checksum=checksum))
            continue
        groups = " | ".join(", ".join(map(str, ranks)) for ranks in by_checksum.values())
        rejected.append(
            RejectedState(
                step=step,
                tier=Tier.MEMORY,
                reason=f"the nodes' snapshots of it differ (as ranks {groups} have them); one of these machines computes or remembers wrongly",
            )
        )
    return candidates, rejected
