"""A finished run loses files that nothing reads any more, and answers everything as before.

    checkpoints/   attempts that no commit record names
    logs/          of generations before the last with logs
    anywhere       drafts of files that were never put in their places

Attempts and drafts go once they are so old, by the clock of the storage, that no writer can need
them: nodes of the run may still be ending. The command may be interrupted between any two files.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.record import SAVE_S, parse_name, save_limit_s
from elastic.config.run_dir import OWN_NAMES, OWN_PREFIX, RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.events import RunFinished
from elastic.observe.log import read_rare
from elastic.report.download import CALL_LIMIT_S, check_exists, readable
from elastic.storage.remote import Listed, Objects, open_store
from elastic.storage.store import reading
from elastic.system.clock import Clock

FOLDERS = ("checkpoints", "logs", "rendezvous", "events", "faults")
DRAFT_S = 3600.0  # a writer needs its draft for a moment
_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}|\.elastic-[0-9a-f]{32}", re.DOTALL)
_LOG = re.compile(r"logs/([0-9]{1,18})/rank[0-9]+(?:/[0-9]{12})?\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """what: the kind of file that it was."""

    name: str
    size_bytes: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """The fields are the keys of `clean --json`. removed: how many of the files are gone."""

    run: str
    files: list[Leftover]
    size_bytes: int
    removed: int


def clean(run: RunDir, clock: Clock, *, agrees: Callable[[list[Leftover]], bool]) -> Cleaned:
    """agrees: whether these files may go; it may take its time.

    Raises UsageError where there is no finished run, or a file cannot be removed; StoreFailed,
    OSError.
    """
    check_exists(run)
    removed, found = 0, _look(run, clock)
    # Once more after a person thought: another run may have begun at this URL meanwhile.
    there = set(_look(run, clock)) if found and agrees(found) else set()
    for each in found:
        if each in there:
            _remove(run, each.name, clock, f"{removed} of {len(found)} files are gone")
            removed += 1
    size_bytes = sum(each.size_bytes for each in found)
    return Cleaned(run=run.url, files=found, size_bytes=size_bytes, removed=removed)


def _look(run: RunDir, clock: Clock) -> list[Leftover]:
    """Raises UsageError unless the run is finished."""
    with readable(run) as local:
        if not read_rare(local.events, RunFinished):
            raise UsageError(
                f"expected a finished run, found that {run.url} is not: elastic-train status says where it stands. Nothing was"
                " removed; what a run that goes on does not need, it removes itself (--keep)"
            )
    logs, probe = open_store(f"{run.url}/logs"), f".elastic-{secrets.token_hex(16)}"
    logs.create(probe, b"")  # the time of a new file is that of the storage's clock
    try:
        files = dict(_objects_of(run) if run.is_remote else _files_of(run))
    finally:
        logs.delete(probe)
    records, damages = list_commits(open_store(run.checkpoints_url), clock)
    named = {record.payload.rpartition("/")[0] for record in records}
    now_s = files.pop(f"logs/{probe}").changed or 0.0
    return leftovers(files, named, {each.step for each in damages}, now_s=now_s)


def leftovers(
    files: Mapping[str, Listed], named: set[str], unclear_steps: set[int], now_s: float
) -> list[Leftover]:
    """Sorted by name. named: attempts of committed checkpoints, listed after the files.

    unclear_steps: of damaged records, which may have named any attempt of their steps. now_s: by
    the storage's clock.
    """
    # A writer stops by itself after one deadline, and a call of it may be on its way then.
    largest = max((each.size_bytes for each in files.values()), default=0)
    limit_s = max(DRAFT_S, 2 * save_limit_s(SAVE_S, largest))
    newest_log = max(map(_generation, files), default=0)

    def what(name: str, changed_s: float | None) -> str | None:
        if 0 < _generation(name) < newest_log:
            return "a log of an earlier generation"
        if changed_s is None or now_s - changed_s <= limit_s:
            return None
        if _is_draft(name):
            return "a draft"
        folder, _, inner = name.partition("/")
        stored = parse_name(inner) if folder == "checkpoints" else None
        if stored and stored.attempt not in ("", *named) and stored.step not in unclear_steps:
            return "an attempt that was not committed"
        return None

    return [
        Leftover(name=name, size_bytes=about.size_bytes, what=kind)
        for name, about in sorted(files.items())
        if (kind := what(name, about.changed)) is not None
    ]


def _generation(name: str) -> int:
    """The generation of a log; 0 for another file."""
    found = _LOG.fullmatch(name)
    return 0 if found is None else int(found[1])


def _is_draft(name: str) -> bool:
    """Of a file that the run itself writes; a recipe's own files beside run.json are not."""
    folder, _, last = name.rpartition("/")
    found = _DRAFT.fullmatch(last)
    if found is None:
        return False
    whole = found["name"] or ""
    return bool(folder) or whole in OWN_NAMES or whole.startswith(OWN_PREFIX)


def _files_of(run: RunDir) -> Iterator[tuple[str, Listed]]:
    """In the run's own folders, and directly in the run directory. Raises OSError."""
    with os.scandir(run.local) as entries:
        names = [each.name for each in entries if not each.is_dir()]
    for folder in FOLDERS:
        for place, _, files in os.walk(run.local / folder, onerror=_raise):
            names += [os.path.relpath(os.path.join(place, name), run.local) for name in files]  # noqa: PTH118
    for name in names:
        with suppress(FileNotFoundError):
            about = (run.local / name).lstat()
            yield name, Listed(size_bytes=about.st_size, changed=about.st_mtime)


def _raise(error: OSError) -> None:
    """A folder that is not there has nothing. Of another error nothing must be concluded."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _objects_of(run: RunDir) -> Iterator[tuple[str, Listed]]:
    objects = Objects(run.url, limit_s=CALL_LIMIT_S)
    return (each for folder in FOLDERS for each in objects.listed(folder).items())


def _remove(run: RunDir, name: str, clock: Clock, so_far: str) -> None:
    # A folder's store is its own: that of the checkpoints may be a link to another disk.
    folder, _, inner = name.partition("/") if "/" in name else ("", "", name)
    store = open_store(f"{run.url}/{folder}")
    try:
        reading(lambda: store.delete(inner), clock)
    except StoreFailed as error:
        raise UsageError(
            f"expected to remove {name}, found: {error}; {so_far}, all needless to the run. Give the command again"
        ) from error
