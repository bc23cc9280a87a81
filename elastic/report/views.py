"""A run as it is now, and what it was begun with, seen by a process outside its group.

A folder without `run.json` says nothing of its beginning: that is None. An age of a heartbeat
compares the storage's clock with the reader's, which may differ by seconds. That is good enough to
tell a person whether a run is alive; the group itself never compares clocks
(rendezvous/failure_detector.py).
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import unquote

from elastic.config import identity
from elastic.config.identity import Identity
from elastic.config.parent import Parent
from elastic.config.run_dir import RunDir
from elastic.errors import ElasticError, UsageError
from elastic.observe.reader import RunReader, read_newest, read_run
from elastic.observe.run_view import RunView, view_of
from elastic.observe.series import MOST_POINTS
from elastic.rendezvous.backends.directory import BEATS
from elastic.report.download import readable, unreadable
from elastic.storage.store import SMALL_LIMIT_BYTES
from elastic.system.clock import Clock, file_time_s
from elastic.system.files import open_regular

PAUSE_S, REMOTE_PAUSE_S = 1.0, 5.0  # between two looks, at least
_PAUSE_PER_COST = 200.0  # so that looking takes a two-hundredth of one core
_LONGEST_S = 60.0


def view_now(run: RunDir, *, curves: bool = False, newest: bool = False) -> RunView:
    """All of a run in a folder; newest: with its newest step alone, however long it is.

    Raises OSError, UsageError, and StoreFailed where the heartbeats are in a store that does not
    answer.
    """
    record = read_newest(run) if newest else read_run(run, points=MOST_POINTS if curves else 0)
    beats_s = heartbeat_ages_s(run.rendezvous_url)
    return view_of(record, beats_s, None if newest else _parent_of(run))


def looks(run: RunDir, clock: Clock, points: int = 0) -> Iterator[tuple[RunView, str]]:
    """(the run, what went wrong with the last look), again and again. points: of each curve.

    Between two looks this sleeps, so that training on the same machine does not notice; a run at a
    URL is read whole each time. Raises UsageError and StoreFailed, at the first look alone.
    """
    with closing(RunReader(run, points=points)) as reader:
        try:
            view, problem, cost_s = _look(run, reader), "", 0.0
        except OSError as error:
            raise unreadable(error) from error
        while True:
            yield view, problem
            least_s, per_cost = (REMOTE_PAUSE_S, 20.0) if run.is_remote else (PAUSE_S, _PAUSE_PER_COST)
            clock.sleep(max(least_s, min(_LONGEST_S, per_cost * cost_s)))
            began_s = clock.monotonic()
            try:
                view, problem = _look(run, reader), ""
            # Without this edge the old view would be shown for ever, as if it were the newest.
            except Exception as error:
                problem = str(error if isinstance(error, ElasticError) else unreadable(OSError(str(error))))
            cost_s = clock.monotonic() - began_s


def _look(run: RunDir, reader: RunReader) -> RunView:
    with readable(run) as there:
        if run.is_remote:
            return view_now(there, curves=reader.has_curves)
        return view_of(reader.read(), heartbeat_ages_s(run.rendezvous_url), _parent_of(there))


def heartbeat_ages_s(url: str) -> dict[str, float]:
    """How long ago each node sent its newest heartbeat, by its id; empty where no group keeps its
    state in this folder or at this URL.

    Raises StoreFailed when an object store does not answer.
    """
    changed = _of_objects(url) if "://" in url else _of_folder(Path(url))
    return {unquote(name): file_time_s() - changed_s for name, changed_s in changed.items()}


def _of_folder(folder: Path) -> dict[str, float]:
    changed = {}
    for path in (folder / BEATS).glob("*"):
        with suppress(FileNotFoundError):  # removed since it was listed
            if not path.name.startswith("."):
                changed[path.name] = path.stat().st_mtime
    return changed


def _of_objects(url: str) -> dict[str, float]:
    from elastic.storage.remote import Objects  # starts a thread, which a folder does not need

    listed = Objects(url, limit_s=120.0).listed("beats")
    return {
        name.rpartition("/")[2]: each.changed for name, each in listed.items() if each.changed is not None
    }


def begun_with(run: RunDir) -> Identity | None:
    """It explains a difference and makes none: what cannot be read is left out."""
    with suppress(UsageError, OSError):
        return identity_of(run)
    return None


def _parent_of(run: RunDir) -> Parent | None:
    """The run that this one began from. Raises UsageError, OSError."""
    return found.parent if (found := identity_of(run)) else None


def identity_of(run: RunDir) -> Identity | None:
    with suppress(FileNotFoundError), open_regular(run.local / identity.NAME, follow=True) as file:
        remedy = "elastic-train --version says which version this is"
        return identity.parse(file.read(SMALL_LIMIT_BYTES + 1), remedy=remedy)
    return None
