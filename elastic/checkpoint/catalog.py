"""A checkpoint is what a commit record names; a reader gets only bytes that match the record.

It does not promise that a listed checkpoint loads: its payload is examined when it is read. It
never changes the store.
"""

from dataclasses import dataclass
from math import inf

from elastic.checkpoint.payload_check import check_state
from elastic.checkpoint.record import CommitRecord, parse, parse_name
from elastic.errors import CheckpointDamaged
from elastic.storage.store import OutsideStore, Store, StoredObject, StoreUnavailable, read_small, reading
from elastic.system.clock import Clock

# Retention may delete what was just listed: each such listing needs another commit meanwhile.
MOST_LISTINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    step: int
    reason: str


def list_commits(
    store: Store, clock: Clock, *, run_id: str = "", until_s: float = inf
) -> tuple[list[CommitRecord], list[Damage]]:
    """The commit records of the store, newest step first, and those that do not parse.

    Of one step that of the latest generation comes first: it replaces one that is damaged. run_id:
    records of other runs are among the damages: a state of another run would load wherever its
    shapes fit, and would spoil the trajectory. until_s: when to try no more.

    Raises StoreFailed when the store cannot be listed, or shows only records that are gone: that is
    not the same as finding nothing.
    """
    listings = 0
    while True:
        entries, listings = reading(store.list, clock, until_s), listings + 1
        records, damages, num_gone = records_in(entries, store, clock, until_s)
        # Retention deleted a record after the listing, because a newer one was committed.
        if not num_gone or listings == MOST_LISTINGS:
            break
    if num_gone and not records:
        raise StoreUnavailable(
            f"{num_gone} commit records were listed and cannot be found; do the store's listings lag behind?"
        )
    foreign = [
        Damage(step=each.step, reason=f"it is of another run ({each.run_id!r:.40}, expected {run_id!r})")
        for each in records
        if run_id not in ("", each.run_id)
    ]
    return [each for each in records if run_id in ("", each.run_id)], damages + foreign


def records_in(
    entries: list[StoredObject], store: Store, clock: Clock, until_s: float = inf
) -> tuple[list[CommitRecord], list[Damage], int]:
    """As `list_commits`, from a listing that the caller has made; and how many records were listed,
    and deleted before they were read.
    """
    records: list[CommitRecord] = []
    damages: list[Damage] = []
    found = [(parsed, entry.name) for entry in entries if (parsed := parse_name(entry.name))]
    names = [(parsed.step, parsed.generation, name) for parsed, name in found if parsed.is_record]
    for step, _, name in sorted(names, reverse=True):
        try:
            record = read_record(store, name, clock, until_s)
        except CheckpointDamaged as error:
            damages.append(Damage(step=step, reason=str(error)))
        else:
            records += [] if record is None else [record]
    return records, damages, len(names) - len(records) - len(damages)


def read_record(store: Store, name: str, clock: Clock, until_s: float = inf) -> CommitRecord | None:
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
    if record.name != name:
        raise CheckpointDamaged(
            f"expected the commit record of {name}, found {record.name}: it was copied there"
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
            if read_record(store, record.name, clock) is not None:
                damages.append(Damage(step=record.step, reason=str(error)))
    return sorted(damages, key=lambda damage: -damage.step)
