"""Two sentences say what a run came to, and what its time went to; they round, and add nothing.

What they count is what the report has: the causes of goodput.py, and the generations of a cause.
"""

from collections import Counter

from elastic.observe.goodput import BETWEEN_STEPS, END, TimeSpent
from elastic.report.picture.words import count, duration, grouped, short
from elastic.report.report import Report
from elastic.report.status import Status

_MOST_CAUSES = 3
_LEAST_SHARE = 0.001  # of the run's time, for a cause that is worth a word
# What a cause is called, once and several times; one that is not here was written by another
# version.
_CAUSES = {
    "failure": ("failure", "failures"),
    "node lost": ("lost node", "lost nodes"),
    "node joined": ("node that joined", "nodes that joined"),
    "node left": ("node that left", "nodes that left"),
    "resume": ("resume", "resumes"),
}
_ALWAYS_ONE = {
    "start": "the start",
    BETWEEN_STEPS: "work between steps (evaluations, saves)",
    END: "the end",
}


def headline(status: Status, report: Report, spent: TimeSpent | None) -> str:
    """What became of the run, and after which time."""
    of = f" of {grouped(status.steps)}" if status.steps else ""
    took = f" after {duration(spent.wall_s)}" if spent else ""
    if status.stopped is not None:
        return f"Stopped by the recipe at step {grouped(report.steps)}{of}{took}: {short(status.stopped.reason)}."
    if report.finished:
        return f"Finished: {count(report.steps, 'step', 'steps')}{f' in {duration(spent.wall_s)}' if spent else ''}."
    if spent is None:
        return "Not begun: no generation has formed yet."
    state = status.state.capitalize()
    why = f": {short(report.failed.reason).rstrip('.')}" if report.failed else ""
    return f"{state} at step {grouped(report.steps)}{of}{took}{why}."


def time_went_to(report: Report, spent: TimeSpent | None) -> str:
    """The share of training, and what cost the most; empty before the first generation."""
    if spent is None or spent.goodput is None:
        return ""
    ranked = sorted(spent.badput_s.items(), key=lambda part: -part[1])
    worth_a_word = [part for part in ranked if part[1] >= _LEAST_SHARE * spent.wall_s][:_MOST_CAUSES]
    times = Counter(each.cause for each in report.generations)
    parts = [f"{duration(seconds)} {_to(kind, times)}" for kind, seconds in worth_a_word]
    share = f"{spent.goodput:.1%}".replace("%", "\u202f%")
    return f"{share} of the time was training{f'; {_listed(parts)}' if parts else ''}."


def _to(kind: str, times: Counter[str]) -> str:
    if kind in _ALWAYS_ONE:
        return f"went to {_ALWAYS_ONE[kind]}"
    one, several = _CAUSES.get(kind, (short(kind), short(kind)))
    return f"went to {count(times[kind] or 1, one, several)}"


def _listed(parts: list[str]) -> str:
    """11 min went to 3 lost nodes, 4 min to 2 failures and 20 s to the start."""
    first, *others = parts
    rest = [part.replace("went to ", "to ", 1) for part in others]
    return first if not rest else ", ".join([first, *rest[:-1]]) + f" and {rest[-1]}"
