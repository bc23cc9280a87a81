"""All that the page shows of a run, as one JSON document of bounded size.

It follows from the view alone. Texts of a run are foreign: they are cut here, and escaped where
they are shown (html_page.py, static/). Where something is left out, the document says how much. Of
a long run the newest is drawn.
"""

from dataclasses import asdict
from statistics import median
from typing import Any

from elastic.observe.goodput import TimeSpent
from elastic.observe.run_view import RunView
from elastic.report.diff import Difference
from elastic.report.figures import count, duration, ended, facts, grouped, short

MOST_GENERATIONS = MOST_MARKS = MOST_COMMITS = 500
MOST_NODES = 48
_NO_MARKS = ("generation", "recovery", "checkpoint")  # which are drawn otherwise
_WRONG = ("fault", "save", "state")
_OVER = ("failed", "drained", "interrupted")
_MOST_ROWS = 20  # of faults and of recoveries
_MOST_FACT = 600  # letters of each, and of what two runs have in common
_MOST_TRACEBACK = 6000  # letters
_GENERATION = ("generation", "cause", "world_size", "first_step", "last_step", "gap")
_TIMES = ("begins_s", "trains_s", "trained_s", "ends_s")


def page_of(name: str, view: RunView) -> dict[str, Any]:
    """view: with curves."""
    assert view.curves is not None
    spent, saves = view.time or TimeSpent(useful_s=0.0, badput_s={}, paused_s=0.0), view.checkpoints
    wrong = [each for each in view.incidents if each.kind in _WRONG]
    longest = sorted(view.recoveries, key=lambda each: -(each.total_s or 0.0))[:_MOST_ROWS]
    totals = [each.total_s for each in view.recoveries if each.total_s is not None]
    is_over = view.generations and view.state in _OVER
    shown = {
        "name": name,
        "state": view.state,
        **asdict(spent),
        "goodput": spent.goodput,
        "wall_s": spent.wall_s,
        "last_sign_s": view.generations[-1].ends_s if is_over else None,
        "lost_steps": view.lost_steps,
        "faults": {
            "number": len(wrong),
            "newest": [each._asdict() for each in wrong[: -_MOST_ROWS - 1 : -1]],
        },
        "recoveries": {
            "number": len(view.recoveries),
            "median_s": median(totals) if totals else None,
            "longest_s": max(totals, default=None),
            "longest": [asdict(each) for each in longest],
        },
        "timeline": _timeline(view) if view.generations else None,
        "checkpoints": {
            "committed": saves.committed,
            "failed": saves.failed,
            "newest_step": saves.newest.event.step if saves.newest else None,
            "size_bytes": saves.newest.event.size_bytes if saves.newest else None,
            "seconds": median(saves.saving_s) if saves.saving_s else None,
        },
        "curves": asdict(view.curves),
    }
    cut: dict[str, Any] = _cut(shown)
    return cut | {
        "headline": short(_headline(view), _MOST_FACT),
        "facts": {short(label): short(text, _MOST_FACT) for label, text in facts(view).items()},
        "traceback": short(view.traceback[-_MOST_TRACEBACK:], _MOST_TRACEBACK),
    }


def page_of_two(difference: Difference, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """a, b: of page_of. What `diff` says of the runs stands beside them."""
    reason = short(difference.reason, _MOST_FACT)
    return {
        "name": f"{a['name']} and {b['name']}",
        "headline": f"{reason[:1].upper()}{reason[1:]}.",
        "same": difference.same,
        "first_difference": difference.first_difference,
        "settings": _cut(difference.settings_text()[:_MOST_ROWS]),
        "a": a,
        "b": b,
    }


def _headline(view: RunView) -> str:
    """What became of the run, and after which time; it rounds, and adds nothing."""
    if not (view.generations or view.step or view.end):  # a run without an agent has none
        return "Not begun: no generation has formed yet."
    state = ended(view.state.capitalize(), view.stopped)
    if view.plain is not None:
        return f"{state}: a script that does not import elastic, {duration(view.plain.running_s)} in its generations."
    took = f" in {duration(view.time.wall_s)}" if view.time else ""
    if view.end:
        return f"{state}: {count(view.step, 'step', 'steps')}{took}."
    of = f" of {grouped(view.length)}" if view.length else ""
    why = f": {view.failed.reason.rstrip('.')}" if view.failed else ""
    return f"{state} at step {grouped(view.step)}{of}{took}{why}."


def _timeline(view: RunView) -> dict[str, Any]:
    """Which node was in which generation, and what happened meanwhile."""
    shown = view.generations[-MOST_GENERATIONS:]
    was_in: dict[str, list[int]] = {}  # by node, in the order in which they came: indices
    for index, generation in enumerate(shown):
        for node in generation.nodes:
            was_in.setdefault(node, []).append(index)
    newest = sorted(was_in, key=lambda node: was_in[node][-1])[-MOST_NODES:]
    told = [each for each in view.incidents if each.kind not in _NO_MARKS]
    saved_s = [each.time for each in view.incidents if each.kind == "checkpoint"]
    return {
        "began_s": view.generations[0].begins_s,
        "ends_s": shown[-1].until_s,
        "num_generations": len(view.generations),
        "num_nodes": len({node for each in view.generations for node in each.nodes}),
        "num_marks": len(told),
        "generations": [
            {"num_nodes": len(each.nodes)} | {name: getattr(each, name) for name in (*_GENERATION, *_TIMES)}
            for each in shown
        ],
        "lanes": [{"name": node, "in": places} for node, places in was_in.items() if node in newest],
        "marks": [each._asdict() for each in told[-MOST_MARKS:] if each.time >= shown[0].begins_s],
        "commits_s": [each_s for each_s in saved_s[-MOST_COMMITS:] if each_s >= shown[0].begins_s],
    }


def _cut(value: Any) -> Any:
    """The same with each text as `short` makes it."""
    match value:
        case str():
            return short(value)
        case dict():
            return {short(key): _cut(each) for key, each in value.items()}
        case list():
            return [_cut(each) for each in value]
        case _:
            return value
