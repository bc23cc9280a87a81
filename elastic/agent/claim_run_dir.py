"""A run directory belongs to one run from the moment in which the first agent claims it.

Of two commands that begin at the same instant one creates `run.json`, and the other is refused by
what it says, before it has written anything. `uid` is a random name of the directory itself: nodes
that find another one there do not share it. It is not a part of `run.json`, because a script
without the library has none, and earlier versions wrote none.
"""

from elastic.config import identity
from elastic.config.identity import Identity
from elastic.config.run_dir import UID, RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.observe.run_uid import claim_uid
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read, read_small
from elastic.system.clock import Clock


def claim(run: RunDir, declared: Identity | None, clock: Clock) -> str:
    """The directory's uid. declared: by a recipe with the library.

    Raises UsageError when the directory belongs to another run, or cannot be written.
    """
    store = open_store(run.url)
    try:
        if declared is not None:
            there = create_or_read(store, identity.NAME, declared.to_json(), clock)
            identity.check(identity.parse(there), declared, run.url)
        return claim_uid(run, clock)
    except StoreFailed as error:
        raise UsageError(
            f"expected to write to the run directory {run.url}, found: {error}; take another --run-dir or change its mode"
        ) from error


def claim_again(run: RunDir, declared: Identity | None, uid: str, clock: Clock) -> bool:
    """Where the directory was moved or removed; False where its name is another run's by now.

    Raises UsageError for a damaged run.json, StoreFailed.
    """
    store = open_store(run.url)
    if declared is not None:
        there = create_or_read(store, identity.NAME, declared.to_json(), clock)
        if identity.parse(there).run_id != declared.run_id:
            return False
    return create_or_read(store, UID, uid.encode(), clock) == uid.encode()


def check_claim(run: RunDir, declared: Identity | None, uid: str, clock: Clock) -> None:
    """Raises UsageError where the directory is no longer the one that was claimed; StoreFailed."""
    store = open_store(run.url)
    there = None if declared is None else read_small(store, identity.NAME, clock)
    if read_small(store, UID, clock) != uid.encode() or (declared is not None and there is None):
        raise UsageError(
            f"{run.url} was set aside, moved or replaced while this command waited to begin in it; give the command again"
        )
    if declared is not None and there is not None:
        identity.check(identity.parse(there), declared, run.url)
