"""Every run below a folder or URL is found, a line each; an unreadable one ends no listing.

Within a run's folder, in folders whose name begins with a dot, and behind links no run is looked
for. A folder that cannot be read has a line too: a run that is not found there is not said to be
missing. It does not promise that a run is whole: `verify` reads its checkpoints, and this does
not.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic.config.identity import NAME
from elastic.config.run_dir import PLACE, UID, RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.report.views import CALL_LIMIT_S, identity_of, readable, view_now
from elastic.storage.remote import Objects

NOT_READ = "not read"
_BLOCK_BYTES = 512  # of st_blocks
# Two of these make a run, which may have lost the others; other programs have one of them too.
_OF_RUN = {NAME, UID, PLACE, "events", "checkpoints", "metrics.jsonl", "rendezvous"}

# Whether each name directly below a folder is a folder; raises OSError or StoreFailed.
_Listing = Callable[[str], Mapping[str, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """The fields are the keys of a run in `runs --json`, in this order.

    name: relative to the folder or URL. state: as in `status`; or damaged or not read, with the
    reason. loss: of the newest step, null where it was not finite or there is none. age_s: of the
    newest step. size_bytes: on the disk; of objects, their sizes.
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
    """The fields are the keys of `runs --json`."""

    folder: str
    runs: list[RunLine]


def list_runs(text: str) -> Runs:
    """text: a folder or URL. Raises UsageError where there is none, StoreFailed."""
    where = RunDir.parse(text)
    if where.is_remote and not where.url.partition("://")[2].strip("/"):
        raise UsageError(f"expected a folder or a URL with a bucket in it, found {text}; write {text}BUCKET")
    listing: _Listing = partial(_listed, where.local)
    if where.is_remote:
        listing = Objects(where.url, limit_s=30.0).directly_below
    try:
        return Runs(folder=where.url, runs=_search(where, listing))
    except OSError as error:
        raise UsageError(
            f"expected a folder with runs in it, found: {error}; write elastic-train runs FOLDER"
        ) from error


def _search(where: RunDir, listing: _Listing) -> list[RunLine]:
    """By name, that of a run relative to where it is looked for.

    Raises OSError or StoreFailed where the folder or URL itself cannot be listed.
    """
    found: list[RunLine] = []
    folders = [""]
    for folder in folders:  # it grows meanwhile
        try:
            entries = listing(folder)
        except (OSError, StoreFailed) as error:
            if not folder:
                raise
            found.append(RunLine(name=folder, state=NOT_READ, reason=str(error)))
            continue
        if len(entries.keys() & _OF_RUN) > 1:
            found.append(_line(where, folder or "."))
            continue
        within = [name for name, is_folder in entries.items() if is_folder and not name.startswith(".")]
        folders += [f"{folder}/{name}".lstrip("/") for name in within]
    return sorted(found, key=lambda each: each.name)


def _listed(where: Path, folder: str) -> dict[str, bool]:
    with os.scandir(where / folder) as entries:
        return {each.name: each.is_dir(follow_symlinks=False) for each in entries}


def _line(where: RunDir, name: str) -> RunLine:
    """Whatever is wrong with a run is a word in its own line."""
    run = RunDir.parse(where.url if name == "." else f"{where.url}/{name}")
    try:
        with readable(run) as local:
            view = view_now(local, newest=True)
            reason = _wrong_identity(local)
        newest = view.newest
        return RunLine(
            name=name,
            state="damaged" if reason else view.state,
            step=None if view.plain else view.step,
            steps=view.length,
            loss=newest.loss if newest else None,
            age_s=max(0.0, view.now_s - newest.time) if newest and newest.time is not None else None,
            size_bytes=_size_bytes(run),
            reason=reason,
        )
    # What no one has thought of, in files that anybody may have written, must not hide all others.
    except Exception as error:
        state = NOT_READ if isinstance(error, OSError | StoreFailed) else "damaged"
        return RunLine(name=name, state=state, reason=f"{error}" or type(error).__name__)


def _wrong_identity(run: RunDir) -> str | None:
    """The reason where run.json is none of this version's."""
    try:
        # A script without the library has neither.
        is_lost = identity_of(run) is None and (run.local / "checkpoints").exists()
    except UsageError as error:
        return str(error)
    return f"there are checkpoints, and no {NAME} that says of what" if is_lost else None


def _size_bytes(run: RunDir) -> int:
    """What its objects or files take, a file with two names once. Links are not followed."""
    if run.is_remote:
        return sum(each.size_bytes for each in Objects(run.url, limit_s=CALL_LIMIT_S).listed("").values())
    found: dict[tuple[int, int], int] = {}
    for path in run.local.rglob("*"):
        with suppress(OSError):  # it was removed meanwhile
            about = path.lstat()
            found[about.st_dev, about.st_ino] = about.st_blocks * _BLOCK_BYTES
    return sum(found.values())
