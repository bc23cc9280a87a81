"""A run as it is now, and what it was begun with, seen by a process outside its group.

A folder without `run.json` says nothing of its beginning: that is None. An age of a heartbeat
compares the storage's clock with the reader's, which may differ by seconds. That is good enough to
tell a person whether a run is alive; the group itself never compares clocks
(rendezvous/failure_detector.py).

A run in an object store is read like one in a folder: from a temporary folder with its parts. It
does not promise the newest seconds, which the nodes may not have uploaded yet.
"""

import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

from elastic.config import identity
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.events import Event, Restored
from elastic.observe import logged_event, step_line, upload_parts
from elastic.observe.log import parse_lines
from elastic.observe.reader import RunReader, read_newest, read_run
from elastic.observe.run_view import RunView, view_of
from elastic.observe.series import MOST_POINTS
from elastic.rendezvous.backends.directory import BEATS
from elastic.storage.remote import Objects
from elastic.storage.store import SMALL_LIMIT_BYTES
from elastic.system.clock import Clock, file_time_s
from elastic.system.files import open_regular

CALL_LIMIT_S = 120.0
_LONGEST_S = 60.0  # between two looks


def view_now(run: RunDir, *, curves: bool = False, newest: bool = False) -> RunView:
    """A run in a folder. newest: without its steps but the newest one, however long it is.

    Raises OSError, UsageError, and StoreFailed where the heartbeats are in a store that does not
    answer.
    """
    record = read_newest(run) if newest else read_run(run, points=MOST_POINTS if curves else 0)
    return view_of(record, heartbeat_ages_s(run.rendezvous_url), None if newest else _parent_of(run))


class RunSource:
    """The newest view of a run; several threads may ask for it.

    Training on the same machine does not notice: however often it is asked, it looks at a run in a
    folder for a two-hundredth of the time, and once a minute at least, and gives the last view in
    between. A run at a URL is
    read whole each time.
    """

    def __init__(self, run: RunDir, clock: Clock, points: int = 0) -> None:
        """points: of each curve."""
        self._run, self._clock = run, clock
        self._reader = RunReader(run, points=points)
        self._lock = threading.Lock()
        self._view: RunView | None = None  # of the last look, if that did not fail
        self._due_s = 0.0

    def view(self) -> RunView:
        """Raises UsageError, StoreFailed."""
        with self._lock:
            began_s = self._clock.monotonic()
            if self._view is None or began_s >= self._due_s:
                self._view = None
                self._view = self._look()
                least_s, per_cost = (5.0, 20.0) if self._run.is_remote else (1.0, 200.0)
                ended_s = self._clock.monotonic()
                self._due_s = ended_s + max(least_s, min(_LONGEST_S, per_cost * (ended_s - began_s)))
            return self._view

    def _look(self) -> RunView:
        try:
            with readable(self._run) as there:
                if self._run.is_remote:
                    return view_now(there, curves=self._reader.has_curves)
                beats_s = heartbeat_ages_s(self._run.rendezvous_url)
                return view_of(self._reader.read(), beats_s, _parent_of(there))
        except OSError as error:
            raise UsageError(
                f"expected files of a run that can be read, found: {error}; try again"
            ) from error


def heartbeat_ages_s(url: str) -> dict[str, float]:
    """How long ago each node sent its newest heartbeat, by its id; empty where no group keeps its
    state in this folder or at this URL.

    Raises StoreFailed when an object store does not answer.
    """
    if "://" in url:
        listed = Objects(url, limit_s=CALL_LIMIT_S).listed(BEATS)
        changed = {name.rpartition("/")[2]: each.changed for name, each in listed.items()}
    else:
        changed = {path.name: _changed_s(path) for path in (Path(url) / BEATS).glob("[!.]*")}
    return {unquote(name): file_time_s() - at_s for name, at_s in changed.items() if at_s is not None}


def _changed_s(path: Path) -> float | None:
    with suppress(FileNotFoundError):  # it was removed since it was listed
        return path.stat().st_mtime
    return None


def _parent_of(run: RunDir) -> identity.Parent | None:
    """The run that this one began from. Raises UsageError, OSError."""
    return found.parent if (found := identity_of(run)) else None


def identity_of(run: RunDir) -> identity.Identity | None:
    with suppress(FileNotFoundError), open_regular(run.local / identity.NAME, follow=True) as file:
        remedy = "elastic-train --version says which version this is"
        return identity.parse(file.read(SMALL_LIMIT_BYTES + 1), remedy=remedy)
    return None


def check_exists(run: RunDir) -> None:
    """Raises UsageError for a folder that has nothing of a run; of a URL nothing is known yet."""
    parts = run.local / identity.NAME, run.events, run.rendezvous, run.local / "checkpoints"
    if not run.is_remote and not any(part.exists() for part in parts):
        raise UsageError(
            f"expected a run directory, found no run in {run.local}; give what --run-dir named when it began"
        )


def nothing_at(objects: Objects) -> UsageError:
    """For a URL that has no run, and perhaps no bucket."""
    return UsageError(
        f"expected a run at {objects.url}, found nothing there; give what --run-dir named when it began"
    )


@contextmanager
def readable(run: RunDir) -> Iterator[RunDir]:
    """The run as a folder: itself, or a copy that exists as long as the context.

    Raises UsageError when there is no run, StoreFailed when the store does not answer.
    """
    if not run.is_remote:
        check_exists(run)
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="elastic-run-") as folder:
        local = RunDir(url=run.url, local=Path(folder))
        _download(Objects(run.url, limit_s=CALL_LIMIT_S), local)
        yield local


def _download(objects: Objects, run: RunDir) -> None:
    # Events are listed after metrics, and uploaded before them. So if a step is found, the event
    # that says what its generation restored is found as well; without it the step could not be
    # placed.
    metrics_parts, events_parts = objects.listed(upload_parts.METRICS), objects.listed(upload_parts.EVENTS)
    run_json = objects.read(identity.NAME)
    if not events_parts and run_json is None:
        raise nothing_at(objects)
    texts = [*_lines(objects, metrics_parts)]
    lines = [*parse_lines(texts, step_line.parse)]
    events = logged_event.in_order(parse_lines(_lines(objects, events_parts), logged_event.parse))
    restored = {each.generation: each.event.step for each in logged_event.of_kind(events, Restored)}
    kept, lost = upload_parts.merge(lines, restored)
    run.events.mkdir(parents=True)
    changed = [each.changed for each in (*metrics_parts.values(), *events_parts.values())]
    changed_s = max((each for each in changed if each is not None), default=0.0)
    if run_json is not None:
        (run.local / identity.NAME).write_bytes(run_json)
    _write(run.events / "all.jsonl", upload_parts.with_losses(events, lost))
    # What cannot be read is counted as in a folder.
    _write(run.metrics, kept, before="{}\n" * (len(texts) - len(lines)))
    for path in (run.events / "all.jsonl", run.metrics):  # as old as what they were made of
        os.utime(path, (changed_s, changed_s))


def _lines(objects: Objects, parts: Iterable[str]) -> Iterator[bytes]:
    """The lines of all parts, in the order of the parts' names."""
    data = objects.read_all(sorted(parts))
    return (line for name in sorted(data) for line in data[name].splitlines())


def _write(
    path: Path, lines: Sequence[step_line.StepLine | logged_event.LoggedEvent[Event]], before: str = ""
) -> None:
    path.write_text(before + "".join(json.dumps(line.to_json()) + "\n" for line in lines))
