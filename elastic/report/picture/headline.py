"""Two sentences say what a run came to, and what its time went to; they round, and add nothing.

What they count are the causes of goodput.py, and how often each of them was there.
"""

from collections.abc import Mapping

from elastic.observe.goodput import BETWEEN_STEPS, DOWN, END, TimeSpent
from elastic.report.picture.words import count, duration, grouped, short
from elastic.report.report import Report
from elastic.report.status import Status

_MOST_CAUSES = 3
_LEAST_SHARE = 0.001  # of the run's time, for a cause that is worth a word
# Without a step for longer than both, a run that is alive is said to stand still.
_STILL_S, _STILL_STEPS = 10.0, 10
# What a cause is called, once and several times; one that is not here was written by another
# version.
_CAUSES = {
    "failure": ("failure", "failures"),
    "node lost": ("lost node", "lost nodes"),
    "node joined": ("node that joined", "nodes that joined"),
    "node left": ("node that left", "nodes that left"),
    "resume": ("resume", "resumes"),
    "ranks differed": ("difference between the ranks", "differences between the ranks"),
}
_ALWAYS_ONE = {
    "start": "the start",
    BETWEEN_STEPS: "work between steps (evaluations, saves)",
    END: "the end",
}


def headline(
    status: Status, report: Report, spent: TimeSpent | None, since_step_s: float | None = None
) -> str:
    """What became of the run, and after which time. since_step_s: of a running one, seconds."""
    of = f" of {grouped(status.steps)}" if status.steps else ""
    took = f" after {duration(spent.wall_s)}" if spent else ""
    if status.stopped is not None:
        return f"Stopped by the recipe at step {grouped(report.steps)}{of}{took}: {short(status.stopped.reason)}."
    if report.plain is not None:
        restarts = count(sum(report.plain.restarts.values()), "restart", "restarts")
        why = f": {short(report.plain.last_exit).rstrip('.')}" if report.plain.last_exit else ""
        ran = f"{restarts}, {duration(report.plain.running_s)} with workers"
        return f"{status.state.capitalize()}: a script that does not import elastic, {ran}{why}."
    if report.finished:
        return f"Finished: {count(report.steps, 'step', 'steps')}{f' in {duration(spent.wall_s)}' if spent else ''}."
    if spent is None:
        return "Not begun: no generation has formed yet."
    state = status.state.capitalize()
    why = f": {short(report.failed.reason).rstrip('.')}" if report.failed else ""
    still = "" if since_step_s is None or not _is_long(since_step_s, report) else _no_step(since_step_s)
    return f"{state} at step {grouped(report.steps)}{of}{took}{why}{still}."


def _is_long(since_step_s: float, report: Report) -> bool:
    """A run that is alive and makes no step for that long may hang."""
    return since_step_s > max(_STILL_S, _STILL_STEPS * (report.step_time_s.median or 0.0))


def _no_step(since_step_s: float) -> str:
    return f"; no step for {duration(since_step_s)}"


def time_went_to(report: Report, spent: TimeSpent | None, *, is_running: bool = False) -> str:
    """The share of training, and what cost the most; empty before the first generation."""
    if spent is None or spent.goodput is None:
        return ""
    ranked = sorted(spent.badput_s.items(), key=lambda part: -part[1])
    named = [part for part in ranked if part[0] != DOWN and _is_worth_a_word(part[1], spent)]
    parts = [
        f"{duration(seconds)} {_to(kind, spent.times, is_running=is_running)}"
        for kind, seconds in named[:_MOST_CAUSES]
    ]
    down_s = spent.badput_s.get(DOWN, 0.0)
    clauses = [f"{spent.goodput:.1%}".replace("%", "\u202f%") + " of the time was training"]
    clauses += [_listed(parts)] if parts else []
    clauses += [f"{duration(down_s)} went by with no group there"] if _is_worth_a_word(down_s, spent) else []
    sentences = [f"{'; '.join(clauses)}."]
    if _is_worth_a_word(spent.paused_s, spent):
        sentences.append(
            f"Beside that time, it lay still for {duration(spent.paused_s)} after it was stopped as asked."
        )
    return " ".join([*sentences, *_waited(report, spent)])


def _waited(report: Report, spent: TimeSpent) -> list[str]:
    """What the slowest rank cost. Its share is one of the time in steps, which all of them is."""
    found = max(report.slow_ranks, key=lambda each: each.share, default=None)
    if found is None:
        return []
    node = f" on {short(found.node)}" if found.node else ""
    others = len(report.slow_ranks) - 1
    more = f" (and for {count(others, 'more rank', 'more ranks')})" if others else ""
    waited = duration(found.share * spent.useful_s)
    return [f"Within the steps, the others waited {waited} for rank {found.rank}{node}{more}."]


def _is_worth_a_word(seconds: float, spent: TimeSpent) -> bool:
    return seconds > 0 and seconds >= _LEAST_SHARE * spent.wall_s


def _to(kind: str, times: Mapping[str, int], *, is_running: bool) -> str:
    if kind == END and is_running:
        return "went to the wait since the last step"
    if kind in _ALWAYS_ONE:
        return f"went to {_ALWAYS_ONE[kind]}"
    one, several = _CAUSES.get(kind, (short(kind), short(kind)))
    return f"went to {count(times.get(kind, 1), one, several)}"


def _listed(parts: list[str]) -> str:
    """11 min went to 3 lost nodes, 4 min to 2 failures and 20 s to the start."""
    first, *others = parts
    rest = [part.replace("went to ", "to ", 1) for part in others]
    return first if not rest else ", ".join([first, *rest[:-1]]) + f" and {rest[-1]}"
