"""Two sentences say what a run came to, and what its time went to; they round, and add nothing."""

from elastic.observe.generations import DOWN
from elastic.observe.goodput import BETWEEN_STEPS, END, TimeSpent
from elastic.observe.run_view import RunView
from elastic.report.words import count, duration, grouped, short

_MOST_CAUSES = 3
_LEAST_SHARE = 0.001  # of the run's time, for a cause that is worth a word
# Without a step for longer than both, a run that is alive is said to stand still.
_STILL_S, _STILL_STEPS = 10.0, 10
# What a cause is called, once and several times; a recipe cannot name another one.
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


def headline(view: RunView) -> str:
    """What became of the run, and after which time."""
    of = f" of {grouped(view.length)}" if view.length else ""
    took = f" after {duration(view.time.wall_s)}" if view.time else ""
    state = view.state.capitalize()
    if view.stopped is not None:
        return f"Stopped by the recipe at step {grouped(view.step)}{of}{took}: {short(view.stopped.reason)}."
    if view.plain is not None:
        restarts = count(sum(view.plain.restarts.values()), "restart", "restarts")
        why = f": {short(view.plain.last_exit).rstrip('.')}" if view.plain.last_exit else ""
        ran = f"{restarts}, {duration(view.plain.running_s)} with workers"
        return f"{state}: a script that does not import elastic, {ran}{why}."
    if view.is_finished:
        in_time = f" in {duration(view.time.wall_s)}" if view.time else ""
        return f"Finished: {count(view.step, 'step', 'steps')}{in_time}."
    if view.time is None:
        return "Not begun: no generation has formed yet."
    why = f": {short(view.failed.reason).rstrip('.')}" if view.failed else ""
    still_s = _still_s(view)
    still = f"; no step for {duration(still_s)}" if still_s else ""
    return f"{state} at step {grouped(view.step)}{of}{took}{why}{still}."


def _still_s(view: RunView) -> float | None:
    """For how long a running run has made no step, where that is so long that it may hang."""
    if view.state != "running":
        return None
    begun_s = [each.begins_s for each in view.generations if each.cause in ("start", "resume")]
    step_s = None if view.newest is None else view.newest.time
    still_s = view.now_s - max([*begun_s, step_s or 0.0])
    is_long = still_s > max(_STILL_S, _STILL_STEPS * (view.step_time_s.median or 0.0))
    return still_s if is_long else None


def time_went_to(view: RunView) -> str:
    """The share of training, and what cost the most; empty before the first generation."""
    spent = view.time
    if spent is None or spent.goodput is None:
        return ""
    ranked = sorted(spent.badput_s.items(), key=lambda part: -part[1])
    named = [part for part in ranked if part[0] != DOWN and _is_worth_a_word(part[1], spent)]
    parts = [f"{duration(seconds)} went to {_cause(kind, view, spent)}" for kind, seconds in named]
    down_s = spent.badput_s.get(DOWN, 0.0)
    clauses = [f"{spent.goodput:.1%}".replace("%", "\u202f%") + " of the time was training"]
    clauses += [_listed(parts[:_MOST_CAUSES])] if parts else []
    clauses += [f"{duration(down_s)} went by with no group there"] if _is_worth_a_word(down_s, spent) else []
    paused = (
        f" Beside that time, it lay still for {duration(spent.paused_s)} after it was stopped as asked."
        if _is_worth_a_word(spent.paused_s, spent)
        else ""
    )
    return f"{'; '.join(clauses)}.{paused}"


def _is_worth_a_word(seconds: float, spent: TimeSpent) -> bool:
    return seconds > 0 and seconds >= _LEAST_SHARE * spent.wall_s


def _cause(kind: str, view: RunView, spent: TimeSpent) -> str:
    if kind == END and view.state == "running":
        return "the wait since the last step"
    if kind in _ALWAYS_ONE:
        return _ALWAYS_ONE[kind]
    one, several = _CAUSES.get(kind, (short(kind), short(kind)))
    return count(spent.times.get(kind, 1), one, several)


def _listed(parts: list[str]) -> str:
    """11 min went to 3 lost nodes, 4 min to 2 failures and 20 s to the start."""
    first, *others = parts
    rest = [part.replace("went to ", "to ", 1) for part in others]
    return first if not rest else ", ".join([first, *rest[:-1]]) + f" and {rest[-1]}"
