"""Every figure of a run's view that is shown by name: once as JSON, and once in words.

A new figure is a line in `report_json` or `status_json`, which scripts rely on, and a line in
`facts`, which report, status, watch and page show. Texts of a run are
foreign here; they are escaped where they are shown. Numbers, durations and foreign texts have their
words here too; none is longer than its limit.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from elastic.events import Stopped
from elastic.observe.doubts import ComparedSteps
from elastic.observe.run_view import RunView
from elastic.observe.step_line import loss_words
from elastic.proof.evidence import roots
from elastic.system.untrusted import printable

MOST_LETTERS = 160  # of a name, a cause or a reason
_REPLAY_DIGITS = 9  # those of a 32-bit float, so that two losses that differ look different
_GENERATION = ("generation", "world_size", "nodes", "first_step", "last_step", "cause")


def report_json(view: RunView) -> dict[str, Any]:
    """The object of `report --json`; see RunView."""
    spent, saved = view.time, view.checkpoints
    return {
        "finished": view.end is not None,
        "stopped": view.stopped,
        "failed": view.failed,
        "steps": view.step,
        "epochs": view.epochs,
        "final_digest": view.end.digest or None if view.end else None,
        "lost_steps": view.lost_steps,
        "goodput": spent.goodput if spent else None,
        "badput_s": spent.badput_s if spent else {},
        "step_time_s": view.step_time_s,
        "checkpoints": {"committed": saved.committed, "failed": saved.failed},
        "audits": view.audits,
        "rehearsals": view.rehearsals,
        "overlaps": view.overlaps,
        "not_restored": view.not_restored,
        "accepted": view.accepted,
        "snapshots": view.snapshots,
        "generations": [{name: getattr(each, name) for name in _GENERATION} for each in view.generations],
        "recoveries": view.recoveries,
        "slow_ranks": view.slow_ranks,
        "shards_by_rank": view.shards_by_rank,
        "lineage": view.lineage,
        "divergences": view.divergences,
        "replays": view.replays,
        "edits": view.edits,
        "logged_by_rank": view.logged_by_rank,
        "scheduled": view.scheduled,
        "unreadable_lines": view.unreadable_lines,
        "plain": view.plain,
    }


def status_json(view: RunView) -> dict[str, Any]:
    """The object of `status --json`. steps: None until the recipe has said how long the run is."""
    saved = view.checkpoints.newest
    return {
        "state": view.state,
        "step": view.step,
        "steps": view.length,
        "generation": view.generation,
        "world_size": view.world_size,
        "workers": view.workers,
        "standbys": view.standbys,
        "last_checkpoint": {"step": saved.event.step, "age_s": max(0.0, view.now_s - saved.time)}
        if saved
        else None,
        "stopped": view.stopped,
        "plain": view.plain,
    }


def facts(view: RunView, *, brief: bool = False) -> dict[str, str]:
    """What is shown beside the tables, by label. brief: what is known without reading all steps."""
    found: dict[str, str] = {}
    of_steps = () if view.plain else _of_steps(view, brief=brief)
    for label, text in chain(_of_run(view), of_steps):
        found[label] = f"{found[label]}\n{text}" if label in found else text
    return found


# A label, and what it says; a label that comes again has several lines.
_Facts = Iterator[tuple[str, str]]


def _of_run(view: RunView) -> _Facts:
    yield "state", ended(view.state, view.stopped)
    standbys = f", {count(view.standbys, 'standby', 'standbys')}" if view.standbys else ""
    yield "generation", f"{view.generation}, {count(view.world_size, 'worker', 'workers')} now{standbys}"
    if view.failed:
        yield "failed", f"exit code {view.failed.exit_code}: {view.failed.reason}"
    if view.plain:
        restarts = view.plain.restarts
        causes = ", ".join(f"{number} {cause}" for cause, number in restarts.items())
        yield "script", "does not import elastic: its steps and states are its own"
        yield "restarts", f"{sum(restarts.values())}{f' ({causes})' if causes else ''}"
        yield "last exit", view.plain.last_exit or "-"
        yield "time", f"{view.plain.running_s:.1f} s in its generations"


def _of_steps(view: RunView, *, brief: bool) -> _Facts:
    left = ""
    if view.recent_step_s is not None and view.length is not None and view.world_size:
        left = f", about {duration((view.length - view.step) * view.recent_step_s)} left"
    yield "step", f"{view.step} of {view.length or 'an unknown number'}{left}"
    yield "loss", loss_words(view.newest.loss if view.newest else None)
    saved = view.checkpoints
    if saved.newest:
        ago = duration(max(0.0, view.now_s - saved.newest.time))
        yield "last checkpoint", f"step {saved.newest.event.step}, {ago} ago"
    else:
        yield "last checkpoint", "none"
    if view.unreadable_lines:
        lines = count(view.unreadable_lines, "line", "lines")
        yield "metrics", f"{lines} cannot be read; those steps are in no figure"
    if not brief:
        yield from _of_all_steps(view)
        yield from _doubts(view)


def _of_all_steps(view: RunView) -> _Facts:
    spent, chosen = view.time, view.snapshots
    goodput = spent.goodput if spent else None
    lost = sorted(spent.badput_s.items(), key=lambda part: -part[1]) if spent else []
    yield "goodput", "unknown" if goodput is None else f"{goodput:.1%}"
    yield "lost to", ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in lost) or "nothing"
    median_s, p99_s = view.step_time_s["median"], view.step_time_s["p99"]
    yield "step time", "-" if median_s is None else f"median {median_s:.3f} s, p99 {p99_s:.3f} s"
    for slow in view.slow_ranks:
        of = f"rank {slow.rank} on {slow.node or 'an unknown node'}"
        yield "slow", f"{of}: the others waited for it for {slow.share:.1%} of the time of the steps"
    if view.shards_by_rank:  # the fewest first: a thousand ranks fit into a line
        ranks = sorted(Counter(view.shards_by_rank).items())
        yield "shards", "; ".join(f"{shards} on {count(of, 'rank', 'ranks')}" for shards, of in ranks)
    yield "epochs", f"{view.epochs} complete"
    yield "lost steps", str(view.lost_steps)
    yield "checkpoints", f"{view.checkpoints.committed} committed, {view.checkpoints.failed} failed"
    yield "audits", f"{view.audits['done']} done, {view.audits['failed']} failed"
    yield "rehearsals", _compared(view.rehearsals)
    yield "overlaps", _compared(view.overlaps)
    if chosen:
        cost_ms, step_ms = chosen.cost_s * 1000, chosen.step_s * 1000
        cost = f"one costs {cost_ms:.1f} ms, and a step takes {step_ms:.0f} ms"
        yield "snapshots", f"interval {chosen.every}; {cost}"
    yield "final digest", view.end.digest or "-" if view.end else "-"
    for state in view.lineage:
        yield "begins from", f"step {state.step} of run {state.run_id} (digest {state.digest[:16]})"


def _doubts(view: RunView) -> _Facts:
    if view.not_restored:  # --json has their values
        yield "not restored", ", ".join(roots(view.not_restored))
    for each in view.divergences:
        of = f"the ranks' states differed, first in {each.entry or 'the state'}"
        yield "diverged", f"step {each.step}: {of}; wrong: {each.node or each.verdict or 'not known'}"
    for differed in view.accepted:
        entry = next(iter(differed.entries), "its result")
        how = f"was done again and differed, first in {entry}; --accept took what came then"
        yield "accepted", f"step {differed.step} {how}"
    for again in view.replays:
        then, now = (loss_words(each, _REPLAY_DIGITS) for each in (again.loss_before, again.loss_now))
        losses = f"loss {then} then, {now} when it was done again"
        went = f"the run went on, since {again.excuse}" if again.excuse else "the run ended there"
        yield "done again", f"step {again.step}, from the state of step {again.restored}: {losses}; {went}"
    for edit in view.edits:
        yield "edited", f"after step {edit.step}: another text of the recipe"
    if view.logged_by_rank:
        yield "logged, of rank 0 alone", ", ".join(view.logged_by_rank)


def ended(how: str, stopped: Stopped | None) -> str:
    if stopped is None:
        return how
    return f"{how}, stopped by the recipe after step {stopped.step} of {stopped.steps} ({stopped.reason})"


def _compared(steps: ComparedSteps) -> str:
    return f"{steps.alike} of {steps.count} alike, {duration(steps.seconds)}" if steps.count else "none"


def short(text: str, most: int = MOST_LETTERS) -> str:
    """The text without what commands a terminal or reorders letters, cut at the end."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def count(number: int, one: str, several: str) -> str:
    return f"{grouped(number)} {one if number == 1 else several}"


def grouped(number: int) -> str:
    """Digits in groups of three, from five digits on."""
    return f"{number:,}".replace(",", " ") if abs(number) >= 10_000 else str(number)


def duration(seconds: float) -> str:
    """In the two largest units: 0.8 s, 41 s, 7 min 3 s, 7 h 41 min, 3 d 2 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller_size, smaller in _UNITS:
        if whole >= size:
            rest = round((whole % size) / smaller_size)
            if rest * smaller_size == size:  # 59 min 59.6 s
                return f"{whole // size + 1} {unit}"
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


_UNITS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
