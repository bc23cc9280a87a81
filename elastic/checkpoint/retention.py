"""What is deleted is never what a run would load next: the newest checkpoints and the one resumed from stay.

It does not promise that what it names is gone afterwards: deleting may fail, and is tried again after the next commit.
"""

from collections.abc import Iterable, Mapping

from elastic.checkpoint.record import CommitRecord


def to_delete(committed_steps: Iterable[int], *, keep: int, resumed_from: int | None) -> list[int]:
    """Steps to delete, oldest first: all but the newest `keep`, and but `resumed_from`.

    `resumed_from` stays until a newer step is among `committed_steps`. Raises ValueError for `keep`
    below 1.
    """
    if keep < 1:
        raise ValueError(f"expected to keep at least 1 checkpoint, found keep={keep}")
    steps = sorted(set(committed_steps))
    newest = set(steps[-keep:])
    restore_source = {resumed_from} if steps and steps[-1] == resumed_from else set()
    return [step for step in steps if step not in newest | restore_source]


def counted(records: Iterable[CommitRecord], *, generation: int, resumed_from: int | None) -> set[int]:
    """Steps that retention may count on and delete.

    A record above `resumed_from` of an older generation was there when this generation looked for a checkpoint and
    was passed over, so it did not load. Counting it as one of the newest would delete a good one in its favour.
    """
    return {
        record.step
        for record in records
        if resumed_from is None or record.step <= resumed_from or record.generation >= generation
    }


def to_sweep(
    uncommitted: Mapping[str, int],
    first_seen: Mapping[str, float],
    *,
    now: float,
    generation: int,
    save_deadline_s: float,
) -> list[str]:
    """Attempts that nobody can still commit: of an older generation, and seen for longer than two save deadlines.

    `uncommitted` maps an attempt's folder to its generation, `first_seen` to when this process saw it first, on the
    clock of `now`, in seconds. A writer fences itself after one deadline, so after two it is surely done with it.
    """
    return sorted(
        attempt
        for attempt, written_by in uncommitted.items()
        if written_by < generation and now - first_seen.get(attempt, now) > 2 * save_deadline_s
    )
