"""A checkpoint is what a commit record names; a reader gets only bytes that match the record.

It does not promise that a listed checkpoint loads: its payload is examined when it is read. It
never changes the store.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf

from elastic.checkpoint.payload_check import check_state
from elastic.checkpoint.record import RECORDS_PER_STEP, CommitRecord, commit_name, parse, parse_name
from elastic.errors import CheckpointDamaged
from elastic.storage.store import (
    OutsideStore,
    Store,
    StoredObject,
    StoreUnavailable,
    read_small,
    reading,
)
from elastic.system.clock import Clock

# Retention may delete what was just listed; a second time in a row needs a second commit.
MOST_LISTINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    step: int
    reason: str


def list_commits(
    store: Store, clock: Clock, *, run_id: str = "", known_step: int = 0, until_s: float = inf
) -> tuple[list[CommitRecord], list[Damage]]:
    """The commit records of the store, newest step first, and those that do not parse.

    Of one step the latest replacement comes first. run_id: records of other runs are among the
    damages: a state of another run would load wherever its shapes fit, and would spoil the
    trajectory. known_step: was committed; where the listing, which may be old, has none as new, its
    records are read by their names. until_s: when to try no more.

    Raises StoreFailed when the store cannot be listed, or shows only records that are gone: that is
    not the same as finding nothing.
    """
    listings = 0
    while True:
        entries, listings = reading(store.list, clock, until_s), listings + 1
        by_name, damages, num_gone = records_in(entries, store, clock, until_s)
        # Retention deleted a record after the listing, because a newer one was committed.
        if not num_gone or listings == MOST_LISTINGS:
            break
    if num_gone and not by_name:
        raise StoreUnavailable(
            f"{num_gone} commit records were listed and cannot be found; do the store's listings lag behind?"
        )
    records = list(by_name.values())
    ours = [each.step for each in records if run_id in ("", each.run_id)]
    if known_step > max(ours, default=0) and known_step not in {each.step for each in damages}:
        names = [
            StoredObject(name=commit_name(known_step, each), size_bytes=0) for each in range(RECORDS_PER_STEP)
        ]
        named, more, _ = records_in(names, store, clock, until_s)
        records, damages = [*named.values(), *records], [*more, *damages]
    foreign = [
        Damage(step=each.step, reason=f"it is of another run ({each.run_id!r:.40}, expected {run_id!r})")
        for each in records
        if run_id not in ("", each.run_id)
    ]
    return [each for each in records if run_id in ("", each.run_id)], damages + foreign


def attempts_of(records: Iterable[CommitRecord]) -> set[str]:
    return {record.payload.rpartition("/")[0] for record in records}


def records_of(payloads: Collection[str], store: Store, clock: Clock) -> list[str]:
    """The names of the records, listed anew, that name one of these payloads, which are deleted.

    A late writer may have created its record after the listing by which they were deleted, and have
    seen its payload there for the last time. Where it creates one after this, it finds the payload
    gone. Raises StoreFailed.
    """
    if not payloads:
        return []
    by_name, _, _ = records_in(reading(store.list, clock), store, clock)
    return [name for name, record in by_name.items() if record.payload in payloads]


def records_in(
    entries: list[StoredObject], store: Store, clock: Clock, until_s: float = inf
) -> tuple[dict[str, CommitRecord], list[Damage], int]:
    """As `list_commits`, by name and from a listing that the caller has made; and how many records
    were listed, and deleted before they were read.
    """
    records: dict[str, CommitRecord] = {}
    damages: list[Damage] = []
    found = [(parsed, entry.name) for entry in entries if (parsed := parse_name(entry.name))]
    names = [(parsed.step, parsed.number, name) for parsed, name in found if parsed.number is not None]
    for step, _, name in sorted(names, reverse=True):
        try:
            record = read_record(store, name, step, clock, until_s)
        except CheckpointDamaged as error:
            damages.append(Damage(step=step, reason=str(error)))
        else:
            if record is not None:
                records[name] = record
    return records, damages, len(names) - len(records) - len(damages)


def is_committed(store: Store, record: CommitRecord, clock: Clock) -> bool:
    """Whether the record is still there. Raises StoreFailed."""
    return record in list_commits(store, clock)[0]


def read_record(
    store: Store, name: str, step: int, clock: Clock, until_s: float = inf
) -> CommitRecord | None:
    """The commit record under `name`, None when there is none.

    Raises CheckpointDamaged, or StoreFailed.
    """
    try:
        data = read_small(store, name, clock, until_s)
    except OutsideStore as error:
        raise CheckpointDamaged(str(error)) from error
    if data is None:
        return None
    record = parse(data)
    if record.step != step:
        raise CheckpointDamaged(
            f"{name} holds the commit record of step {record.step}, expected {step}: it was copied there"
        )
    return record


def verify(store: Store, clock: Clock, run_id: str = "") -> list[Damage]:
    """Read every committed payload; the damaged ones, newest first; and the records of other runs.

    A payload that retention deletes meanwhile is not damage. Raises StoreFailed.
    """
    records, damages = list_commits(store, clock, run_id=run_id)
    for record in records:
        try:
            check_state(store, record, clock)
        except CheckpointDamaged as error:
            if is_committed(store, record, clock):
                damages.append(Damage(step=record.step, reason=str(error)))
    return sorted(damages, key=lambda damage: -damage.step)
