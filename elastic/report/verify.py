"""Every committed checkpoint of a run is read whole, and damage is listed; nothing is repaired.

A checkpoint without damage is one whose bytes a restore accepts: it is the state that its record
names. Whether that state fits a recipe's objects, only the recipe can tell.
"""

from dataclasses import dataclass

from elastic.checkpoint.catalog import Damage, list_commits, of_run, verify
from elastic.config import identity
from elastic.config.run_dir import RunDir
from elastic.report.download import CALL_LIMIT_S, check_exists, nothing_at
from elastic.storage.remote import Objects, open_store
from elastic.storage.store import read_small
from elastic.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The fields are the keys of `verify --json`; `committed`: the steps of all commit records."""

    committed: list[int]
    damage: list[Damage]


def verify_run(run: RunDir, clock: Clock) -> Verification:
    """Raises UsageError when there is no run, StoreFailed when the store does not answer."""
    check_exists(run)
    store = open_store(run.checkpoints_url)
    records, _ = list_commits(store, clock)
    data = read_small(open_store(run.url), identity.NAME, clock)
    if run.is_remote and not records and data is None:
        objects = Objects(run.url, limit_s=CALL_LIMIT_S)
        if not objects.directly_below(""):
            raise nothing_at(objects)
    foreign = [] if data is None else of_run((records, []), identity.parse(data).run_id)[1]
    return Verification(
        committed=sorted({record.step for record in records}),
        damage=verify(store, clock) + foreign,
    )
