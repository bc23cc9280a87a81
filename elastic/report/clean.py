"""A finished run loses files that nothing reads any more, and answers everything as before.

    checkpoints/   attempts that no commit record names
    logs/          of generations before the last with logs

The command may be interrupted between any two files. It does not promise that `verify` finds no
damage where a node that is still ending commits such an attempt meanwhile.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elastic.checkpoint.record import parse_name
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.events import RunFinished
from elastic.observe.log import read_rare
from elastic.report.views import check_exists, readable
from elastic.storage.remote import open_store
from elastic.storage.store import reading
from elastic.system.clock import Clock

_ATTEMPT, _OLD_LOG = "an attempt that was not committed", "a log of an earlier generation"
_LOG = re.compile(r"([0-9]{1,18})/rank[0-9]+(?:/[0-9]{12})?\.log")


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

    Raises UsageError where there is no finished run, StoreFailed.
    """
    check_exists(run)
    found = _look(run, clock)
    # Once more after a person thought: another run may have begun at this URL meanwhile.
    there = set(_look(run, clock)) if found and agrees(found) else set()
    gone = [each for each in found if each in there]
    for each in gone:
        _remove(run, each.name, clock)
    size_bytes = sum(each.size_bytes for each in found)
    return Cleaned(run=run.url, files=found, size_bytes=size_bytes, removed=len(gone))


def _look(run: RunDir, clock: Clock) -> list[Leftover]:
    """Sorted by name. Raises UsageError unless the run is finished."""
    with readable(run) as local:
        if not read_rare(local.events, RunFinished):
            raise UsageError(
                f"expected a finished run, found that {run.url} is not: elastic-train status says where it stands. Nothing was"
                " removed; what a run that goes on does not need, it removes itself (--keep)"
            )
    store = open_store(run.checkpoints_url)
    stored = [(parse_name(each.name), each) for each in reading(store.list, clock)]
    # Listed after the attempts: one that is committed meanwhile has its record.
    there = (parse_name(each.name) for each in reading(store.list, clock))
    committed = {each.folder for each in there if each is not None and each.is_record}
    found = [
        Leftover(name=f"checkpoints/{each.name}", size_bytes=each.size_bytes, what=_ATTEMPT)
        for at, each in stored
        if at is not None and at.folder not in committed
    ]
    logs = [
        (int(log[1]), each)
        for each in reading(open_store(f"{run.url}/logs").list, clock)
        if (log := _LOG.fullmatch(each.name))
    ]
    newest = max((generation for generation, _ in logs), default=0)
    return found + [
        Leftover(name=f"logs/{each.name}", size_bytes=each.size_bytes, what=_OLD_LOG)
        for generation, each in logs
        if generation < newest
    ]


def _remove(run: RunDir, name: str, clock: Clock) -> None:
    # A folder's store is its own: that of the checkpoints may be a link to another disk.
    folder, _, inner = name.partition("/")
    reading(partial(open_store(f"{run.url}/{folder}").delete, inner), clock)
