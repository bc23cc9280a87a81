"""The newest state that any node has wins, in memory or in storage alike.

The order is a function of what the ranks report as available. Of a state in parts all parts must be
there; one whose nodes are gone is lost, as an image with its last node is. Snapshots of one step
that should be equal and are not are all refused: nothing says which of them is right. So are those
that were taken after the last step that all ranks agreed on.

It does not load anything: a candidate that turns out not to load makes way for the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.checkpoint.record import CommitRecord, missing_text
from elastic.divergence import Divergence
from elastic.errors import NothingLoads

MOST_LISTED = 5
VOID = "it was taken while the ranks' states differed"
INCOMPLETE = "some of its parts were in the memory of nodes that are gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedState:
    """A snapshot, or in storage a checkpoint, that must not be used."""

    step: int
    reason: str
    is_stored: bool

    def __str__(self) -> str:
        return f"{'checkpoint' if self.is_stored else 'snapshot'} step={self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedSnapshot:
    """A snapshot in a node's memory, which a generation took.

    checksum, of: as of SnapshotInfo. parts: those of the state that are there.
    """

    step: int
    checksum: str
    generation: int
    of: int = 0
    parts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableStates:
    """What one rank can restore from.

    divergence: the difference between ranks that its agent knows of. snapshots: those in its node's
    memory, newest first. records: the storage's commit records, newest first, on rank 0 alone.
    damaged: those of both that cannot be used.
    """

    divergence: Divergence | None = None
    snapshots: tuple[OfferedSnapshot, ...] = ()
    records: tuple[CommitRecord, ...] = ()
    damaged: tuple[RejectedState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A state that training may resume from.

    holders: by part of the state, the ranks that have it; a state that is not cut has one part.
    record: None for a snapshot. checksum: of a state in parts, else empty.
    """

    step: int
    holders: tuple[tuple[int, ...], ...]
    record: CommitRecord | None = None
    checksum: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have some of it."""
        return tuple(sorted({rank for of_part in self.holders for rank in of_part}))

    @property
    def is_stored(self) -> bool:
        return self.record is not None

    def rejected(self, reason: str) -> RejectedState:
        return RejectedState(step=self.step, reason=reason, is_stored=self.is_stored)


def newest_divergence(available: Sequence[AvailableStates]) -> Divergence | None:
    """The difference that has steps done again. A node that just joined knows none."""
    known = [of_rank.divergence for of_rank in available if of_rank.divergence is not None]
    return max(known, key=lambda each: (each.generation, each.step), default=None)


def order_candidates(
    available: Sequence[AvailableStates], again: int = 0
) -> tuple[list[Candidate], list[RejectedState]]:
    """(candidates, best first; refused states), from what each rank has, in rank order.

    again: a step to be done again. If its state is the newest, the state before it comes first.
    """
    candidates, rejected = _snapshots(available)
    for of_rank in available:
        rejected += of_rank.damaged
        candidates += [
            Candidate(
                step=each.step,
                holders=_readers(each, len(available)),
                record=each,
                checksum=each.checksum if each.parts else "",
            )
            for each in of_rank.records
        ]
    # Of two at the same step the one in memory is nearer. The sort is stable, so records of one
    # step keep the storage's order (the latest replacement first).
    candidates.sort(key=lambda each: (-each.step, each.is_stored))
    if again and candidates and candidates[0].step == again:
        candidates.sort(key=lambda each: each.is_stored or each.step != again - 1)
    return candidates, rejected


def _snapshots(available: Sequence[AvailableStates]) -> tuple[list[Candidate], list[RejectedState]]:
    """One candidate per step whose snapshots are all equal; the others are rejected."""
    known = newest_divergence(available)
    offered: dict[int, dict[str, list[tuple[int, OfferedSnapshot]]]] = {}  # by step and checksum
    void: set[int] = set()
    for rank, of_rank in enumerate(available):
        for each in of_rank.snapshots:
            if known is not None and each.generation == known.generation and each.step > known.agreed:
                void.add(each.step)
            else:
                offered.setdefault(each.step, {}).setdefault(each.checksum, []).append((rank, each))
    candidates = []
    rejected = [RejectedState(step=step, reason=VOID, is_stored=False) for step in sorted(void, reverse=True)]
    for step, by_checksum in offered.items():
        alike = list(by_checksum.values())
        if len(alike) > 1:
            groups = " | ".join(", ".join(str(rank) for rank, _ in ranks) for ranks in alike)
            reason = f"the nodes' snapshots of it differ (ranks {groups}): one machine's memory or arithmetic is faulty"
            rejected.append(RejectedState(step=step, reason=reason, is_stored=False))
        elif (holders := _holders(alike[0])) is not None:
            (_, one), *_ = alike[0]
            checksum = one.checksum if one.of else ""
            candidates.append(Candidate(step=step, holders=holders, checksum=checksum))
        else:
            rejected.append(RejectedState(step=step, reason=INCOMPLETE, is_stored=False))
    return candidates, rejected


def _holders(offered: Sequence[tuple[int, OfferedSnapshot]]) -> tuple[tuple[int, ...], ...] | None:
    """By part; None where one is missing. A step done twice may have been cut in two ways."""
    for of in dict.fromkeys(each.of for _, each in offered):
        of_parts: list[list[int]] = [[] for _ in range(of or 1)]
        for rank, each in offered:
            for number in each.parts if each.of == of else ():
                of_parts[number].append(rank)
        if all(of_parts):
            return tuple(map(tuple, of_parts))
    return None


def _readers(record: CommitRecord, world_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple((number % world_size,) for number in range(len(record.payloads)))


def check_none_is_missing(
    committed_step: int, candidates: Sequence[Candidate], rejected: Sequence[RejectedState], run_url: str
) -> None:
    """Raises NothingLoads where a newer checkpoint than all that can be found was committed.

    A state that must not be used is not missing: it is reported, and an older one is used.
    """
    newest = max((each.step for each in candidates), default=0)
    is_there = any(each.is_stored and each.step == committed_step for each in rejected)
    if newest < committed_step and not is_there:
        raise NothingLoads(missing_text(committed_step, newest, run_url))


def check_nothing_found(rejected: Sequence[RejectedState], run_url: str) -> None:
    """Raises NothingLoads with the reasons if there was a state that counts, and none loads."""
    found = sorted(
        (each for each in rejected if each.reason not in (VOID, INCOMPLETE)), key=lambda each: -each.step
    )
    if not found:
        return
    reasons = [f"{each}: {' '.join(each.reason.split())}" for each in found[:MOST_LISTED]]
    raise NothingLoads(
        f"states of this run were found, and none of them loads: {'; '.join(reasons)}. Nothing was changed: "
        f"elastic-train verify {run_url} lists the damage, and --fresh would set the run aside and begin a new one"
    )
