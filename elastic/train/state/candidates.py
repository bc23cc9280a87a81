"""The newest state that any node has wins, in memory or in storage alike.

The order is a function of what the ranks report as available. Snapshots of one step that should be
equal and are not are all refused: nothing says which of them is right. So are those that were taken
after the last step that all ranks agreed on. A state from which training never made a new step
gives way to the next older one.

It does not load anything: a candidate that turns out not to load makes way for the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.checkpoint.record import CommitRecord, missing_text
from elastic.divergence import Divergence
from elastic.errors import NothingLoads
from elastic.system.raised_error import RESTORES_OF_ONE_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedState:
    """A snapshot, or in storage a checkpoint, that must not be used.

    is_suspect: what was trained before it may be wrong as well, and not only its own bytes.
    is_foreign: it is another run's.
    """

    step: int
    reason: str
    is_stored: bool
    is_suspect: bool = False
    is_foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedSnapshot:
    """A snapshot in a node's memory, which a generation took. checksum: of its image."""

    step: int
    checksum: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableStates:
    """What one rank can restore from.

    failures: consecutive failures without a new step, SIGKILLs excluded, as its agent counts them;
    0 on a node that just joined. divergence: the difference between ranks that its agent knows of.
    snapshots: those in its node's memory, newest first. records: the storage's commit records,
    newest first, on rank 0 alone. damaged: those of both that cannot be used.
    """

    failures: int = 0
    divergence: Divergence | None = None
    snapshots: tuple[OfferedSnapshot, ...] = ()
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


def newest_divergence(available: Sequence[AvailableStates]) -> Divergence | None:
    """The difference because of which steps are done again. A node that just joined knows none."""
    known = [of_rank.divergence for of_rank in available if of_rank.divergence is not None]
    return max(known, key=lambda each: (each.generation, each.step), default=None)


def is_void(snapshot: OfferedSnapshot, known: Divergence | None) -> bool:
    """Whether it was taken after the last step that all ranks agreed on."""
    if known is None or snapshot.generation != known.generation:
        return False
    return snapshot.step > known.agreed


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
    # Older snapshots of a node are there for the case that nodes differ. A few steps before the
    # newest one, they would bring the same failures.
    newest = {of_rank.snapshots[0].step for of_rank in available if of_rank.snapshots}
    older = {each.step for each in candidates if not each.is_stored} - newest
    steps = sorted({each.step for each in candidates if each.is_stored or each.step in newest}, reverse=True)
    failures = max(of_rank.failures for of_rank in available)
    num_skipped = min(max(0, failures - 1) // RESTORES_OF_ONE_STATE, max(0, len(steps) - 1))
    skipped = steps[:num_skipped]
    rejected += [
        RejectedState(
            step=each.step,
            reason=f"it was restored {RESTORES_OF_ONE_STATE} times and no new step followed",
            is_stored=each.is_stored,
            is_suspect=True,
        )
        for each in candidates
        if each.step in skipped
    ]
    if skipped:
        candidates = [each for each in candidates if each.is_stored or each.step not in older]
    return [each for each in candidates if each.step not in skipped], rejected


def with_one_again(candidates: list[Candidate], again: int) -> list[Candidate]:
    """First the state before the step that is to be done again, if its own is the newest."""
    before = [each for each in candidates if each.step == again - 1 and not each.is_stored]
    if not again or not before or candidates[0].step != again:
        return candidates
    return [*before, *(each for each in candidates if each not in before)]


def _snapshots(available: Sequence[AvailableStates]) -> tuple[list[Candidate], list[RejectedState]]:
    """One candidate per step whose snapshots are all equal; the others are rejected."""
    known = newest_divergence(available)
    holders: dict[int, dict[str, list[int]]] = {}
    differed: set[int] = set()
    for rank, of_rank in enumerate(available):
        for each in of_rank.snapshots:
            if is_void(each, known):
                differed.add(each.step)
            else:
                holders.setdefault(each.step, {}).setdefault(each.checksum, []).append(rank)
    candidates = []
    rejected = [
        RejectedState(step=step, reason="it was taken while the ranks' states differed", is_stored=False)
        for step in sorted(differed, reverse=True)
    ]
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
        rejected.append(RejectedState(step=step, reason=reason, is_stored=False, is_suspect=True))
    return candidates, rejected


def check_none_is_missing(
    committed_step: int, candidates: Sequence[Candidate], rejected: Sequence[RejectedState], run_url: str
) -> None:
    """Raises NothingLoads where a newer checkpoint than all that can be found was committed.

    One that is there and must not be used is not missing: it is reported, and an older one is used.
    Another run's is there only in its very place; a newer one of it says nothing.
    """
    stored = [
        each.step
        for each in rejected
        if each.is_stored and (not each.is_foreign or each.step == committed_step)
    ]
    newest = max([each.step for each in candidates] + stored, default=0)
    if newest < committed_step:
        raise NothingLoads(missing_text(committed_step, newest, run_url))
