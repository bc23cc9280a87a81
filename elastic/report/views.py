"""A run as it is now, and what it was begun with, seen by a process outside its group.

A folder without `run.json` says nothing of its beginning: that is None. An age of a heartbeat
compares the storage's clock with the reader's, which may differ by seconds. That is good enough to
tell a person whether a run is alive; the group itself never compares clocks
(rendezvous/failure_detector.py).
"""

import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from elastic.config import identity
from elastic.config.identity import Identity
from elastic.config.parent import Parent
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.observe.reader import RunReader, read_newest, read_run
from elastic.observe.run_view import RunView, view_of
from elastic.observe.series import MOST_POINTS
from elastic.rendezvous.backends.directory import BEATS
from elastic.report.download import CALL_LIMIT_S, readable
from elastic.storage.remote import Objects
from elastic.storage.store import SMALL_LIMIT_BYTES
from elastic.system.clock import Clock, file_time_s
from elastic.system.files import open_regular

_LONGEST_S = 60.0  # between two looks


def view_now(run: RunDir, *, curves: bool = False, newest: bool = False) -> RunView:
    """All of a run in a folder; newest: with its newest step alone, however long it is.

    Raises OSError, UsageError, and StoreFailed where the heartbeats are in a store that does not
    answer.
    """
    record = read_newest(run) if newest else read_run(run, points=MOST_POINTS if curves else 0)
    beats_s = heartbeat_ages_s(run.rendezvous_url)
    return view_of(record, beats_s, None if newest else _parent_of(run))


class RunSource:
    """The newest view of a run; several threads may ask for it.

    Training on the same machine does not notice: however often it is asked, it looks at a run in a
    folder for a two-hundredth of the time, and gives the last view in between. A run at a URL is
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


def _parent_of(run: RunDir) -> Parent | None:
    """The run that this one began from. Raises UsageError, OSError."""
    return found.parent if (found := identity_of(run)) else None


def identity_of(run: RunDir) -> Identity | None:
    with suppress(FileNotFoundError), open_regular(run.local / identity.NAME, follow=True) as file:
        remedy = "elastic-train --version says which version this is"
        return identity.parse(file.read(SMALL_LIMIT_BYTES + 1), remedy=remedy)
    return None
