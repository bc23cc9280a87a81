"""All runs below a folder or URL, a line each; an unreadable one ends no listing.

It does not promise that a run is whole: `verify` reads its checkpoints, and this does not.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from elastic.config import identity
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.observe.reader import read_newest
from elastic.observe.run_view import view_of
from elastic.report.download import readable
from elastic.report.find_runs import Found, Unread, find_runs
from elastic.report.views import heartbeat_ages_s
from elastic.storage.remote import Objects, check_url
from elastic.storage.store import SMALL_LIMIT_BYTES
from elastic.system.clock import Clock
from elastic.system.files import open_regular
from elastic.system.untrusted import parse_json

DAMAGED, OTHER_VERSION, UNREAD = "damaged", "other version", "not read"
REMOTE_LIMIT_S = 120.0  # for all runs at a URL
_BLOCK_BYTES = 512  # of st_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """The fields are the keys of a run in `runs --json`, in this order.

    name: relative to the folder or URL. state: as in `status`; or damaged, other version or not
    read, with the reason. loss: of the newest step, null where it was not finite or there is none.
    age_s: of the newest step. size_bytes: on the disk, without runs within;
    of objects, their sizes.
    """

    name: str
    state: str
    step: int | None = None
    steps: int | None = None
    loss: Any = None
    age_s: float | None = None
    size_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The fields are the keys of `runs --json`. unread: folders that were not looked into."""

    folder: str
    runs: list[RunLine]
    unread: list[Unread]


def list_runs(text: str, clock: Clock) -> Runs:
    """text: a folder or URL. Raises UsageError where there is none, StoreFailed."""
    where = RunDir.parse(text)
    if "://" in text and not text.partition("://")[2].strip("/") and where.is_remote:
        raise UsageError(f"expected a folder or a URL with a bucket in it, found {text}; write {text}BUCKET")
    check_url(where.url)
    try:
        found = find_runs(where)
    except OSError as error:
        raise UsageError(
            f"expected a folder with runs in it, found: {error}; write elastic-train runs FOLDER"
        ) from error
    return Runs(folder=where.url, runs=list(_lines(where, found, clock)), unread=found.unread)


def _lines(where: RunDir, found: Found, clock: Clock) -> Iterator[RunLine]:
    deadline_s = clock.monotonic() + REMOTE_LIMIT_S
    for name in found.names:
        run = RunDir.parse(where.url if name == "." else f"{where.url}/{name}")
        if where.is_remote and clock.monotonic() >= deadline_s:
            reason = f"it took longer than {REMOTE_LIMIT_S:.0f} s to read those before it; give its own URL"
            yield RunLine(name=name, state=UNREAD, reason=reason)
        else:
            yield _line(name, run, size=_size_of(where, run, name, found))


def _size_of(where: RunDir, run: RunDir, name: str, found: Found) -> Callable[[], int]:
    begin = "" if name == "." else f"{name}/"
    nested = [each.removeprefix(begin) for each in found.names if each != name and each.startswith(begin)]
    if where.is_remote:
        return lambda: _size_of_objects(run.url, nested)
    return lambda: _size_on_disk(run.local, nested)


def _line(name: str, run: RunDir, size: Callable[[], int]) -> RunLine:
    """Whatever is wrong with a run is a word in its own line."""
    try:
        with readable(run) as local:
            view = view_of(read_newest(local), heartbeat_ages_s(run.rendezvous_url))
            word, reason = _wrong_identity(local)
        newest = view.newest
        return RunLine(
            name=name,
            state=word or view.state,
            step=None if view.plain else newest.step if newest else 0,
            steps=view.length,
            loss=newest.loss if newest else None,
            age_s=max(0.0, view.now_s - newest.time) if newest and newest.time is not None else None,
            size_bytes=size(),
            reason=reason,
        )
    # What no one has thought of, in files that anybody may have written, must not hide all others.
    except Exception as error:
        state = UNREAD if isinstance(error, OSError | StoreFailed) else DAMAGED
        return RunLine(name=name, state=state, reason=f"{error}" or type(error).__name__)


def _wrong_identity(run: RunDir) -> tuple[str | None, str | None]:
    """(a word, the reason) where run.json is none of this version's."""
    with suppress(FileNotFoundError), open_regular(run.local / identity.NAME, follow=True) as file:
        data = file.read(SMALL_LIMIT_BYTES + 1)
        try:
            identity.parse(data, remedy="elastic-train --version says which version this is")
        except UsageError as error:
            return (OTHER_VERSION if _is_of_other_version(data) else DAMAGED), str(error)
        return None, None
    # A script without the library has neither.
    if (run.local / "checkpoints").exists():
        return DAMAGED, f"there are checkpoints, and no {identity.NAME} that says of what"
    return None, None


def _is_of_other_version(data: bytes) -> bool:
    """Another format; or, beside fields that this version knows, others or fewer."""
    with suppress(ValueError):
        found = parse_json(data)
        known = {field.name for field in fields(Identity)}
        if isinstance(found, dict) and {"recipe", "format"} <= found.keys():
            return found["format"] != identity.FORMAT or not known - {"parent"} <= found.keys() <= known
    return False


def _size_on_disk(folder: Path, nested: list[str]) -> int:
    """What the files take, one with two names once. Links are not followed."""
    skipped, seen, total = {folder / each for each in nested}, set(), 0
    for place, below, files in os.walk(folder):
        below[:] = [each for each in below if Path(place) / each not in skipped]
        for name in (*files, *below):
            with suppress(OSError):  # it was removed meanwhile
                about = (Path(place) / name).lstat()
                if (about.st_dev, about.st_ino) not in seen:
                    seen.add((about.st_dev, about.st_ino))
                    total += about.st_blocks * _BLOCK_BYTES
    return total


def _size_of_objects(url: str, nested: list[str]) -> int:
    begins = tuple(f"{each}/" for each in nested)
    listed = Objects(url, limit_s=REMOTE_LIMIT_S).listed("")
    return sum(each.size_bytes for name, each in listed.items() if not begins or not name.startswith(begins))
