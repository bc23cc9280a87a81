"""A finished run loses what it does not need any more, and answers everything as before.

The run directory's lease is held meanwhile, so that no command begins in it, and none that trains
loses a file. Every file that goes is one that nothing reads, so the command may be interrupted
between any two of them. leftovers.py says which files those are.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from elastic.care.leftovers import FOLDERS, Leftover, StoredFile, leftovers
from elastic.checkpoint.catalog import list_commits
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.events import RunFinished
from elastic.observe.log import read_rare
from elastic.rendezvous.first_look import Holder
from elastic.rendezvous.lease import LeaseRenewal, RunLease
from elastic.report.download import check_exists, readable
from elastic.storage.objects import Objects
from elastic.storage.remote import open_store
from elastic.storage.store import reading
from elastic.system.clock import Clock
from elastic.system.untrusted import printable

KEEP_ALIVE_S = 2.0  # of the lease
CALL_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """The fields are the keys of `clean --json`. removed: how many of the files are gone."""

    run: str
    files: list[Leftover]
    size_bytes: int
    removed: int


def clean(
    run: RunDir, clock: Clock, *, agrees: Callable[[list[Leftover]], bool], notify: Callable[[str], None]
) -> Cleaned:
    """agrees: whether these files may go; it may take its time.

    Raises UsageError where there is no run, or one that is not finished or still in use; and where
    a file cannot be removed, StoreFailed where the storage does not answer.
    """
    check_exists(run)
    _check_finished(run)
    with _leased(run, clock, notify) as counter:
        found = _look(run, counter, clock)
        removed = 0
        if found and agrees(found):
            # A record may have come since, while a person thought.
            there = set(_look(run, counter, clock))
            for each in found:
                if each in there:
                    _remove(run, each, clock, removed, len(found))
                    removed += 1
    size_bytes = sum(each.size_bytes for each in found)
    return Cleaned(run=run.url, files=found, size_bytes=size_bytes, removed=removed)


def _check_finished(run: RunDir) -> None:
    with readable(run) as local:
        if not read_rare(local.events, RunFinished):
            raise UsageError(
                f"expected a finished run, found that {run.url} is not: elastic-train status {run.url} says where it stands."
                " Nothing was removed; what a run that goes on does not need, it removes itself (--keep)"
            )


@contextmanager
def _leased(run: RunDir, clock: Clock, notify: Callable[[str], None]) -> Iterator[str]:
    """Gives the name of a file that is written again and again: the storage shows by it what time
    it is by its own clock.
    """
    lease_of_run = RunLease(run.url, clock)
    place = f"elastic-train clean on {printable(socket.gethostname())}, pid {os.getpid()}"
    try:
        lease = lease_of_run.take(
            place,
            keep_alive_s=KEEP_ALIVE_S,
            holder=lambda _token: Holder.ELSEWHERE,
            check=lambda: None,
            notify=notify,
        )
    except UsageError as error:
        raise UsageError(f"nothing was removed, since nodes may still need it: {error}") from error
    renewal = LeaseRenewal(
        lease_of_run, lease, leads=lambda: True, is_in=lambda: True, on_lost=lambda _sentence: None
    )
    try:
        lease_of_run.renew(lease)
        yield lease_of_run.counter_name(lease)
    finally:
        renewal.stop(releases=True)


def _look(run: RunDir, counter: str, clock: Clock) -> list[Leftover]:
    files = list(_objects_of(run) if run.is_remote else _files_of(run))
    records, damages = list_commits(open_store(run.checkpoints_url), clock)
    times_s = (each.changed_s for each in files if each.name == counter and each.changed_s is not None)
    return leftovers(files, records, {each.step for each in damages}, now_s=next(times_s, 0.0))


def _files_of(run: RunDir) -> Iterator[StoredFile]:
    """Of the run's own folders, and directly in the run directory. Raises OSError."""
    with os.scandir(run.local) as entries:
        names = [each.name for each in entries if not each.is_dir()]
    for folder in FOLDERS:
        for place, _, files in os.walk(run.local / folder, onerror=_raise):
            names += [os.path.relpath(os.path.join(place, name), run.local) for name in files]  # noqa: PTH118
    for name in names:
        with suppress(FileNotFoundError):
            about = (run.local / name).lstat()
            yield StoredFile(name=name, size_bytes=about.st_size, changed_s=about.st_mtime)


def _raise(error: OSError) -> None:
    """A folder that is not there has nothing. Of another error nothing must be concluded."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _objects_of(run: RunDir) -> Iterator[StoredFile]:
    objects = Objects(run.url, limit_s=CALL_LIMIT_S)
    for folder in FOLDERS:
        for name, about in objects.listed(folder).items():
            yield StoredFile(name=name, size_bytes=about.size_bytes, changed_s=about.changed)


def _remove(run: RunDir, leftover: Leftover, clock: Clock, removed: int, total: int) -> None:
    # A store for each folder: that of the checkpoints may be a link to another disk.
    folder, _, name = leftover.name.rpartition("/")
    top, _, rest = leftover.name.partition("/")
    store = open_store(f"{run.url}/{top}") if folder else open_store(run.url)
    try:
        reading(lambda: store.delete(rest if folder else name), clock)
    except StoreFailed as error:
        raise UsageError(
            f"expected to remove {run.url}/{leftover.name}, found: {error}; {removed} of {total} files are gone, none of which the run"
            " needs. Give the command again"
        ) from error
