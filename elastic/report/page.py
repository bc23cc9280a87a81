"""All that the page shows of a run, as one JSON document of bounded size.

It follows from the view alone. Texts of a run are foreign: they are cut here, and escaped where
they are shown (html_page.py, static/). Where something is left out, the document says how much.
"""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from elastic.observe.run_view import RunView
from elastic.observe.series import Series
from elastic.report.diff import Difference
from elastic.report.figures import count, duration, ended, facts, grouped, short, shortened_at_front
from elastic.report.timeline import since, timeline

_WRONG = ("fault", "save", "state")
_OVER = ("failed", "drained", "interrupted")
_MOST_ROWS = 20  # of faults and of recoveries
_MOST_FACT = 600  # letters of each, and of what two runs have in common
_MOST_TRACEBACK = 6000  # letters
_DIGITS = 6  # of a value


def page_of(name: str, view: RunView) -> dict[str, Any]:
    spent, curves = view.time, view.curves
    drawn = timeline(view.generations, view.incidents) if view.generations else None
    return {
        "name": short(name),
        "state": view.state,
        "headline": _headline(view),
        "goodput": spent.goodput if spent else None,
        "last_sign_s": view.generations[-1].ends_s if drawn and view.state in _OVER else None,
        "wall_s": spent.wall_s if spent else 0.0,
        "useful_s": spent.useful_s if spent else 0.0,
        "badput_s": _short_names(spent.badput_s) if spent else {},
        "paused_s": spent.paused_s if spent else 0.0,
        "lost_steps": view.lost_steps,
        "faults": _faults(view),
        "recoveries": _recoveries(view),
        "timeline": drawn,
        "checkpoints": _checkpoints(view),
        "logged": [_series(each) for each in (curves.loss, *curves.logged) if each] if curves else [],
        "names_left_out": curves.names_left_out if curves else 0,
        "step_time": _series(curves.step_s if curves else None),
        "slowest": _series(curves.slowest_s if curves else None),
        "others": _series(curves.others_s if curves else None),
        "clock": _series(curves.time_s if curves else None, view.began_s or 0.0),
        "facts": {short(label): short(text, _MOST_FACT) for label, text in facts(view, "report").items()},
        "traceback": shortened_at_front(view.traceback, _MOST_TRACEBACK),
    }


def page_of_two(difference: Difference, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """a, b: of page_of. What `diff` says of the runs stands beside them."""
    reason = short(difference.reason, _MOST_FACT)
    return {
        "name": f"{a['name']} and {b['name']}",
        "headline": f"{reason[:1].upper()}{reason[1:]}.",
        "same": difference.same,
        "first_difference": difference.first_difference,
        "settings": [short(each) for each in difference.settings_text()[:_MOST_ROWS]],
        "a": a,
        "b": b,
    }


def _headline(view: RunView) -> str:
    """What became of the run, and after which time; it rounds, and adds nothing."""
    if not (view.generations or view.step or view.end):  # a run without an agent has none
        return "Not begun: no generation has formed yet."
    state = short(ended(view.state.capitalize(), view.stopped))
    if view.plain is not None:
        return f"{state}: a script that does not import elastic, {duration(view.plain.running_s)} in its generations."
    took = f" in {duration(view.time.wall_s)}" if view.time else ""
    if view.end:
        return f"{state}: {count(view.step, 'step', 'steps')}{took}."
    of = f" of {grouped(view.length)}" if view.length else ""
    why = f": {short(view.failed.reason).rstrip('.')}" if view.failed else ""
    return f"{state} at step {grouped(view.step)}{of}{took}{why}."


def _faults(view: RunView) -> dict[str, Any]:
    """The newest first."""
    found, began_s = [each for each in view.incidents if each.kind in _WRONG], view.began_s or 0.0
    shown = found[: -_MOST_ROWS - 1 : -1]
    return {
        "number": len(found),
        "shown": [
            {"at": since(began_s, each.time), "node": short(each.node), "what": short(each.text)}
            for each in shown
        ],
    }


def _recoveries(view: RunView) -> dict[str, Any]:
    """The longest first."""
    ranked = sorted(view.recoveries, key=lambda each: -(each.total_s or 0.0))[:_MOST_ROWS]
    totals = [each.total_s for each in view.recoveries if each.total_s is not None]
    return {
        "number": len(view.recoveries),
        "median_s": median(totals) if totals else None,
        "longest_s": max(totals, default=None),
        "shown": [
            {name: short(value) if isinstance(value, str) else value for name, value in asdict(each).items()}
            for each in ranked
        ],
    }


def _checkpoints(view: RunView) -> dict[str, Any]:
    found = view.checkpoints
    return {
        "committed": found.committed,
        "failed": found.failed,
        "newest_step": found.newest.event.step if found.newest else None,
        "size_bytes": found.newest.event.size_bytes if found.newest else None,
        "seconds": median(found.saving_s) if found.saving_s else None,
    }


def _series(series: Series | None, began_s: float = 0.0) -> dict[str, Any] | None:
    """began_s: is taken off each value."""
    if series is None:
        return None
    values = [None if each is None else float(f"{each - began_s:.{_DIGITS}g}") for each in series.values]
    return asdict(series) | {"name": short(series.name), "values": values}


def _short_names(parts: Mapping[str, float]) -> dict[str, float]:
    return {short(kind): size for kind, size in sorted(parts.items(), key=lambda part: -part[1])}
