"""Pictures of runs that are only values: no file is written, and nothing is trained."""

from collections.abc import Sequence

import drawn_runs

from elastic.events import Event
from elastic.observe.logged_event import LoggedEvent
from elastic.observe.step_batch import with_values
from elastic.observe.step_columns import columns_of
from elastic.observe.step_line import StepLine
from elastic.report.facts import report_facts
from elastic.report.picture.picture import MOST_BYTES, Picture, ReadRun, picture
from elastic.report.picture.series import MOST_POINTS, RunSeries
from elastic.report.report import summarise
from elastic.report.status import status


def drawn(
    events: Sequence[LoggedEvent[Event]],
    lines: Sequence[StepLine],
    name: str = "runs/x",
    *,
    now_s: float | None = None,
    most_bytes: int = MOST_BYTES,
) -> Picture:
    """now_s: where the run goes on, seconds since 1970."""
    trained = columns_of(lines)
    report = summarise(events, trained, now_s=now_s)
    beats = {} if now_s is None else {"alive": 1.0}
    read = ReadRun(
        name=name,
        events=events,
        trained=trained,
        series=series_of(lines),
        now_s=now_s,
        report=report,
        status=status(events, lines[-1] if lines else None, beats, now_s or drawn_runs.BEGAN + 1e7),
        facts=report_facts(report),
    )
    return picture(read, most_bytes)


def series_of(lines: Sequence[StepLine], most: int = MOST_POINTS) -> RunSeries:
    found = RunSeries(most)
    found.add(with_values(lines))
    return found
