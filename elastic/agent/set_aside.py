"""--fresh renames a used run directory, in which nothing trains, and deletes nothing of it.

It takes the directory's lease before, so that no other command begins in it meanwhile, and renews
it for as long as it moves objects. It does not promise that a process which slept through all of
that sees it at once: such a process finds itself fenced, since the group's state stays.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from math import inf

from elastic.config.identity import NAME
from elastic.config.run_dir import UID, RunDir
from elastic.errors import ElasticError, UsageError
from elastic.rendezvous.first_look import Holder
from elastic.rendezvous.lease import Lease, LeaseRenewal, RunLease, Standing
from elastic.storage.remote import FsspecStore, open_store
from elastic.storage.store import read_small
from elastic.system.clock import Clock, timestamp
from elastic.system.files import listing, sync_folder
from elastic.system.untrusted import printable

KEEP_ALIVE_S = 2.0  # of the lease


def set_aside(run: RunDir, clock: Clock, notify: Callable[[str], None]) -> None:
    """Raises UsageError while the directory is used, or where it cannot be renamed; StoreFailed."""
    marks = run.local / NAME, run.events, run.rendezvous
    try:
        is_used = bool(listing(run.local))
        is_run = any(path.exists() for path in marks)
    except OSError as error:
        raise UsageError(f"expected to read {run.local}, found: {error}; take another --run-dir") from error
    if is_used and not is_run:
        raise UsageError(
            f"{run.local} holds files and no run, so --fresh leaves it alone; take another --run-dir"
        )
    stored = [each.name for each in open_store(run.url).list()] if run.is_remote else []
    if not is_used and not stored:
        return
    if nested := _nested_run(run, stored):
        raise UsageError(
            f"expected {run.url} to hold one run, found another one in {nested}, which --fresh would move with it; move that one"
            " elsewhere first, or take another --run-dir"
        )
    run_lease = RunLease(run.url, clock)
    lease = run_lease.take(
        f"a command with --fresh on {printable(socket.gethostname())}, pid {os.getpid()}",
        keep_alive_s=KEEP_ALIVE_S,
        holder=lambda _token: Holder.ELSEWHERE,
        check=lambda: None,
        notify=notify,
    )
    suffix = f".aside-{timestamp(clock.wall())}"
    # On a thread, because one large object may be moved for longer than the lease lasts.
    renewal = LeaseRenewal(
        run_lease, lease, leads=lambda: True, is_in=lambda: True, on_lost=lambda _sentence: None
    )
    try:
        _rename(run, suffix, _keeping(run_lease, lease, clock), clock)
    except (ElasticError, OSError) as error:
        raise UsageError(
            f"expected to rename the run directory {run.url}, found: {error}; what was moved by then is in {run.url}{suffix}. Give the"
            " command again, or take another --run-dir"
        ) from error
    finally:
        renewal.stop(releases=True)
    if not run.is_remote:
        with suppress(ElasticError, OSError):  # the old run may go on there, under its new name
            RunLease(run.url + suffix, clock).release(lease)


def _nested_run(run: RunDir, stored: list[str]) -> str | None:
    """Where another run lies below this one; its processes may train there.

    A script without the library has no run.json. Raises UsageError.
    """
    for name in stored:
        folder, _, last = name.rpartition("/")
        is_mark = last == NAME or (
            last == UID and any(each.startswith(f"{folder}/lease/") for each in stored)
        )
        if folder and is_mark:
            return f"{run.url}/{folder}"
    for folder, below, files in os.walk(run.local):  # what cannot be listed is left out
        if folder != str(run.local) and (NAME in files or (UID in files and "lease" in below)):
            return folder
    return None


def _keeping(run_lease: RunLease, lease: Lease, clock: Clock) -> Callable[[], None]:
    """To be called before each move; raises UsageError once another command has the lease.

    A process that was stopped moves nothing of the run that began meanwhile: it looks itself, and
    does not wait for its thread to do so.
    """
    looked_s = -inf

    def check() -> None:
        nonlocal looked_s
        now_s = clock.monotonic()
        if now_s - looked_s < lease.renew_s:
            return
        if run_lease.standing(lease) is Standing.LOST:
            raise UsageError("another command took it over while this one stood still")
        looked_s = now_s

    return check


def _rename(run: RunDir, suffix: str, check: Callable[[], None], clock: Clock) -> None:
    # The group's state stays: its versions and generations go on counting, so that a process of the
    # old run that wakes up late finds itself fenced, and puts no state of its own in their place.
    check()
    if run.local.exists():
        aside = run.local.with_name(run.local.name + suffix)
        run.local.rename(aside)
        if (aside / run.rendezvous.name).exists():
            run.local.mkdir(exist_ok=True)
            (aside / run.rendezvous.name).rename(run.rendezvous)
            sync_folder(aside)
            sync_folder(run.local)
        # Before the new run writes anything: what it commits and syncs below a name that a power
        # cut takes back would be lost, and the old run would be there again.
        sync_folder(run.local.parent)
    if run.is_remote:
        _move_objects(run, suffix, check, clock)


def _move_objects(run: RunDir, suffix: str, check: Callable[[], None], clock: Clock) -> None:
    """One by one. The lease stays too: until it is released no other command begins here."""
    store = FsspecStore(run.url)
    staying = run.rendezvous_url.removeprefix(run.url).strip("/") + "/", "lease/"
    names = (each.name for each in store.list() if not each.name.startswith(staying))
    # run.json goes first and commit records next: if the move stops half-way, the rest is never
    # taken for a part of the new run.
    for name in sorted(names, key=lambda name: (name != NAME, not name.endswith(".json"), name)):
        check()
        store.move(name, suffix)
    # What a command claimed meanwhile, in that order: it writes run.json before uid, finds one of
    # them gone when it asks for the lease, and must not keep the name from this command.
    for name in (UID, NAME):
        if read_small(store, name, clock) is not None:
            check()
            store.move(name, suffix)
