"""Deleting breaks no committed checkpoint that is kept, and no save of this generation.

A checkpoint's record is deleted first, then its payload. Only the newest generation deletes: an
older one does not know which checkpoints were found to be damaged since. The newest checkpoints
stay, and those that this generation's resume passed over are not counted among them. Of older
steps go this run's checkpoints and the uncommitted attempts of earlier generations. It does not
promise to delete anything: a later run of it finds what a failed or interrupted one left, from the
listing alone. That may be an old record without its payload, where a late writer died.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from elastic.checkpoint.catalog import records_in
from elastic.checkpoint.record import COMMIT, CommitRecord, Save, is_record_of_part, parse_name, unsealed
from elastic.errors import CheckpointDamaged, Fenced
from elastic.storage.store import Store, read_small, reading
from elastic.system.clock import Clock


def prune(  # noqa: PLR0913 - what a process that commits knows
    store: Store,
    clock: Clock,
    *,
    run_id: str,
    keep: int,
    step: int,
    generation: int,
    resumed_from: int | None,
    is_newest: Callable[[], bool],
) -> None:
    """Keep the newest `keep` checkpoints of the run, at least one, for `generation`, which has
    committed `step`.

    resumed_from: as in `may_count`. is_newest: whether `generation` is the newest; it is asked
    before the listing and before each deletion. Raises Fenced once it is not; StoreFailed.
    """

    def check() -> None:
        if not is_newest():
            raise Fenced(f"generation {generation} is not the newest: a newer one deletes old checkpoints")

    def delete(name: str) -> None:
        check()
        reading(lambda: store.delete(name), clock)

    check()
    entries = reading(store.list, clock)
    records, _, _ = records_in(entries, store, clock)
    present = {(entry.name, entry.size_bytes) for entry in entries}
    # Counting checkpoints of another run, whose steps may be far higher, would delete ours, and so
    # would counting one without its payload.
    ours = [each for each in records if each.run_id == run_id]
    whole = [each for each in ours if all((one.name, one.size_bytes) in present for one in each.payloads)]
    counting = may_count(whole, step=step, generation=generation, resumed_from=resumed_from)
    oldest_kept = min(sorted(counting)[-keep:], default=0)

    found = [(at, each.name) for each in entries if (at := parse_name(each.name)) and at.step < oldest_kept]
    deleted, committed = {each.folder for each in ours}, {each.folder for each in records}
    # Of each step the records come first: a crash then leaves a payload without a record, which is
    # not a checkpoint. In the other order it would leave a checkpoint that does not load.
    for _, _, name in sorted((at.step, not at.is_record, name) for at, name in found if at.folder in deleted):
        delete(name)
    # Attempts of this generation may be another writer's, who is about to commit one.
    swept = [
        (at.folder, name)
        for at, name in found
        if at.folder not in committed and at.generation < generation and not at.is_record
    ]
    for _, name in swept:
        delete(name)
    # A late writer may have created its record after the listing, and have seen its payload there
    # for the last time. Where it creates one after this, it finds the payload gone.
    for folder in sorted({folder for folder, _ in swept}):
        delete(f"{folder}/{COMMIT}")


def sweep_parts(store: Store, clock: Clock, save: Save) -> None:
    """Delete what failed saves of this generation have left of parts at earlier steps.

    A node may still be at one of these. So the records of parts go first, and the parts that they
    name only where no commit record is there then: who creates one after that finds them gone.
    Raises StoreFailed.
    """
    found = [(at, each.name) for each in reading(store.list, clock) if (at := parse_name(each.name))]
    committed = {at.folder for at, _ in found if at.is_record}
    swept: dict[str, list[str]] = {}  # by folder, the parts that are named
    for at, name in found:
        is_earlier = at.step < save.step and at.generation == save.generation
        if is_earlier and at.folder not in committed and is_record_of_part(name):
            data = read_small(store, name, clock)
            with suppress(CheckpointDamaged):
                swept.setdefault(at.folder, []).append(unsealed(data or b"")["name"])
            reading(partial(store.delete, name), clock)
    for folder, names in swept.items():
        if read_small(store, f"{folder}/{COMMIT}", clock) is None:
            for name in names:
                reading(partial(store.delete, f"{folder}/{name}"), clock)


def may_count(
    records: Collection[CommitRecord], *, step: int, generation: int, resumed_from: int | None
) -> set[int]:
    """Steps that retention, after `step` was committed, may count among the newest.

    A checkpoint that did not load was passed over at a resume. If it counted as one of the newest,
    a good one would be deleted in its favour. A record above `step` is such a one, because training
    was behind it. So is a record of an older generation above `resumed_from`, the step of the
    checkpoint from which this generation resumed; None where it resumed from memory. And so is one
    that lies above a checkpoint of a later generation, while that exists.
    """
    before = step if resumed_from is None else resumed_from
    return {
        record.step
        for record in records
        if record.step <= (step if record.generation >= generation else before)
        and not any(each.generation > record.generation and each.step < record.step for each in records)
    }
