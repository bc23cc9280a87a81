"""The view of a run from its events and lines, as tests write them, without files."""

from collections.abc import Mapping, Sequence

from elastic.config.identity import Parent
from elastic.observe.logged_event import Events
from elastic.observe.run_view import Record, RunView, view_of
from elastic.observe.step_columns import columns_of
from elastic.observe.step_line import StepLine


def viewed(
    events: Events,
    lines: Sequence[StepLine] = (),
    *,
    newest: StepLine | None = None,
    beats: Mapping[str, float] | None = None,
    now: float | None = None,
    parent: Parent | None = None,
) -> RunView:
    """now: by the clock of the records; None for the time of the newest of them."""
    last = newest if newest or not lines else lines[-1]
    times = [*(each.time for each in events), *([last.time] if last and last.time is not None else [])]
    age_s = 0.0 if now is None else now - max(times, default=0.0)
    record = Record(events=events, steps=columns_of(lines), newest=last, age_s=age_s)
    return view_of(record, beats, parent)
