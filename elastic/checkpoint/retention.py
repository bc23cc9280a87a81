"""Retention never deletes a checkpoint that the run would load next.

The newest ones stay, and those that a resume passed over do not count. It does not promise that
what it names is gone afterwards: deleting may fail, and is tried again after the next commit.
"""

from collections.abc import Iterable, Mapping

from elastic.checkpoint.record import CommitRecord


def to_delete(counted_steps: Iterable[int], *, keep: int) -> list[int]:
    """Steps to delete, oldest first: all but the newest `keep`. Raises ValueError for `keep` below
    1.
    """
    if keep < 1:
        raise ValueError(f"expected to keep at least 1 checkpoint, found keep={keep}")
    return sorted(set(counted_steps))[:-keep]


def counted(
    records: Iterable[CommitRecord], *, step: int, generation: int, resumed_from: int | None
) -> set[int]:
    """Steps that retention, after `step` was committed, may count among the newest, and may delete.

    A checkpoint that did not load was passed over at a resume. If it counted as one of the newest,
    a good one would be deleted in its favour. A record above `step` is such a one, because training
    was behind it. So is a record of an older generation above `resumed_from`, the step of the
    checkpoint from which this generation resumed; None where it resumed from memory. And so is one
    above a checkpoint of a later generation than its own, as long as that is there.
    """
    before = step if resumed_from is None else resumed_from
    there = list(records)
    return {
        record.step
        for record in there
        if record.step <= (step if record.generation >= generation else before)
        and not any(each.generation > record.generation and each.step < record.step for each in there)
    }


def to_sweep(
    uncommitted: Mapping[str, int],
    first_seen: Mapping[str, float],
    *,
    now: float,
    generation: int,
    save_deadline_s: float,
) -> list[str]:
    """Attempts that no writer can commit any more: of an older generation, and seen for two save
    deadlines.

    `uncommitted` maps the folder of an attempt to the generation that wrote it, and `first_seen` to
    the time when this process saw it first, in seconds on the clock of `now`. A writer stops by
    itself after one deadline; the second one is for a call that was on its way then.
    """
    return sorted(
        attempt
        for attempt, written_by in uncommitted.items()
        if written_by < generation and now - first_seen.get(attempt, now) > 2 * save_deadline_s
    )
