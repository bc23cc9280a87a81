"""A run as it is now, seen by a process outside its group."""

from elastic.config.run_dir import RunDir
from elastic.observe.reader import RunReader, read_run
from elastic.observe.run_view import RunView, view_of
from elastic.observe.series import MOST_POINTS
from elastic.rendezvous.backends.heartbeat_ages import heartbeat_ages_s
from elastic.report.begun_with import parent_of


def view_now(run: RunDir, reader: RunReader | None = None) -> RunView:
    """With its curves. reader: of this run, where it was looked at before.

    Raises OSError, UsageError, and StoreFailed where the heartbeats are in a store that does not
    answer.
    """
    record = read_run(run, points=MOST_POINTS) if reader is None else reader.read()
    return view_of(record, heartbeat_ages_s(run.rendezvous_url), parent_of(run))
