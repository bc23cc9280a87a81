"""Every run below a folder or URL is found, and nothing else.

A run within another one's folder is found too. Folders whose name begins with a dot are not looked
into, nor are links, unless one leads to a run itself. Where a folder cannot be read, or there are
more than a listing may take, the result says so: a run that is not found there is not said to be
missing.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.config.identity import NAME
from elastic.config.run_dir import OWN_NAMES, PLACE, UID, RunDir
from elastic.errors import StoreFailed
from elastic.storage.remote import Objects

MOST_FOLDERS = 100_000  # of a disk
MOST_LISTINGS = 300  # of an object store, each a request
# With a folder of events, any of these makes a run: a script without the library has no run.json.
_BESIDE_EVENTS = {"checkpoints", "metrics.jsonl", "rendezvous"}
# And any of these beside run.json, which other programs may have too.
_BESIDE_IDENTITY = {*_BESIDE_EVENTS, UID, PLACE, "events"}

# Whether each name directly below a folder is a folder; raises OSError or StoreFailed.
Listing = Callable[[str], Mapping[str, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A folder that was not looked into."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """names: of the runs relative to where they were looked for, `.` for that itself; sorted."""

    names: list[str]
    unread: list[Unread]


def find_runs(where: RunDir) -> Found:
    """Raises OSError or StoreFailed where the folder or URL itself cannot be listed, and UsageError
    where there is no such bucket.
    """
    if where.is_remote:
        objects = Objects(where.url, limit_s=30.0)
        found = _search(lambda name: objects.directly_below("" if name == "." else name), MOST_LISTINGS)
        if not found.names:
            objects.check_bucket()
        return found
    return _search(lambda name: _listed(where.local / name, is_top=name == "."), MOST_FOLDERS)


def _search(listing: Listing, most: int) -> Found:
    """Level by level, so that of too many folders the nearest are looked into."""
    names: list[str] = []
    unread: list[Unread] = []
    level, listings = ["."], 0
    while level:
        below: list[str] = []
        for folder in level:
            if listings == most:
                reason = f"there are more than {most} folders; name one of them"
                return Found(names=sorted(names), unread=[*unread, Unread(name=folder, reason=reason)])
            listings += 1
            try:
                entries = listing(folder)
            except (OSError, StoreFailed) as error:
                if folder == ".":
                    raise
                unread.append(Unread(name=folder, reason=str(error)))
                continue
            is_run = holds_run(entries)
            if is_run:
                names.append(folder)
            below += _folders_in(folder, entries, is_run=is_run)
        level = below
    return Found(names=sorted(names), unread=unread)


def holds_run(entries: Mapping[str, bool]) -> bool:
    """entries: as `Listing` gives them. A run that has lost a part of its files is one as well."""
    if entries.get(NAME) is False and entries.keys() & _BESIDE_IDENTITY:
        return True
    if entries.get(UID) is False and entries.get(PLACE):
        return True
    return bool(entries.get("events") and entries.keys() & _BESIDE_EVENTS)


def _folders_in(folder: str, entries: Mapping[str, bool], *, is_run: bool) -> Iterator[str]:
    for name, is_folder in sorted(entries.items()):
        if is_folder and not name.startswith(".") and not (is_run and name in OWN_NAMES):
            yield name if folder == "." else f"{folder}/{name}"


def _listed(folder: Path, *, is_top: bool) -> dict[str, bool]:
    with os.scandir(folder) as entries:
        found = {each.name: _is_folder(each) for each in entries}
    if folder.is_symlink() and not is_top:
        # It leads to a run. What lies below that may lead back here.
        return {name: is_folder and name in OWN_NAMES for name, is_folder in found.items()}
    return found


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """A link counts as one only if it leads to a run: behind others a search might never end."""
    if not entry.is_symlink():
        return entry.is_dir()
    with suppress(OSError), os.scandir(entry.path) as inside:
        return holds_run({each.name: each.is_dir() for each in inside})
    return False
