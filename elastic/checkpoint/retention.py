"""Retention never deletes a checkpoint that the run would load next.

The newest ones stay, and the one resumed from. It does not promise that what it names is gone
afterwards: deleting may fail, and is tried again after the next commit.
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
    """Steps that retention may count among the newest, and may delete.

    A record above `resumed_from` of an older generation existed when this generation looked for a
    checkpoint, and was passed over because it did not load. If it counted as one of the newest, a
    good checkpoint would be deleted in its favour.
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
