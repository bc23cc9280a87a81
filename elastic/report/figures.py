"""Every figure of a run's view that is shown by name: once as JSON, and once in words.

A new figure is a line in `report_json` or `status_json`, which scripts rely on, and a line in
`_of_steps`, from which report, status, watch and page take what they show. Texts of a run are
foreign here; they are escaped where they are shown. Numbers, durations and foreign texts have their
words here too; none is longer than its limit.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
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
        "step": view.newest.step if view.newest else 0,
        "steps": view.length,
        "generation": view.generation,
        "world_size": view.world_size,
        "workers": view.workers,
        "last_checkpoint": {"step": saved.event.step, "age_s": max(0.0, view.now_s - saved.time)}
        if saved
        else None,
        "stopped": view.stopped,
        "plain": view.plain,
    }


def facts(view: RunView, where: str) -> dict[str, str]:
    """What is shown beside the tables, by label. where: report, status or watch."""
    found: dict[str, str] = {}
    for places, label, text in chain(_of_run(view), () if view.plain else _of_steps(view)):
        if where in places:
            found[label] = f"{found[label]}\n{text}" if label in found else text
    return found


# Where it is shown, its label, and what it says; a label that comes again has several lines.
_Facts = Iterator[tuple[tuple[str, ...], str, str]]
_ALL = ("report", "status", "watch")
_REPORT, _LIVE, _LONG = ("report",), ("status", "watch"), ("report", "watch")


def _of_run(view: RunView) -> _Facts:
    yield ("report", "status"), "state", ended(view.state, view.stopped)
    yield _LIVE, "generation", f"{view.generation}, {count(view.world_size, 'worker', 'workers')}"
    if view.failed:
        yield _ALL, "failed", f"exit code {view.failed.exit_code}: {view.failed.reason}"
    if view.plain:
        restarts = view.plain.restarts
        causes = ", ".join(f"{number} {cause}" for cause, number in restarts.items())
        yield _ALL, "script", "does not import elastic: its steps and states are its own"
        yield _ALL, "restarts", f"{sum(restarts.values())}{f' ({causes})' if causes else ''}"
        yield _ALL, "last exit", view.plain.last_exit or "-"
        yield _ALL, "time", f"{view.plain.running_s:.1f} s in its generations"


def _of_steps(view: RunView) -> _Facts:
    saved, spent, chosen = view.checkpoints, view.time, view.snapshots
    goodput = spent.goodput if spent else None
    lost = sorted(spent.badput_s.items(), key=lambda part: -part[1]) if spent else []
    yield _ALL, "step", f"{view.step} of {view.length or 'an unknown number'}"
    yield _REPORT, "epochs", f"{view.epochs} complete"
    yield ("watch",), "loss", loss_words(view.newest.loss if view.newest else None)
    if saved.newest:
        ago = duration(max(0.0, view.now_s - saved.newest.time))
        yield _LIVE, "last checkpoint", f"step {saved.newest.event.step}, {ago} ago"
    else:
        yield _LIVE, "last checkpoint", "none"
    yield _REPORT, "lost steps", str(view.lost_steps)
    yield _LONG, "goodput", "unknown" if goodput is None else f"{goodput:.1%}"
    yield _LONG, "lost to", ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in lost) or "nothing"
    median_s, p99_s = map(_seconds, (view.step_time_s["median"], view.step_time_s["p99"]))
    yield _LONG, "step time", f"median {median_s}, p99 {p99_s}"
    for slow in view.slow_ranks:
        of = f"rank {slow.rank} on {slow.node or 'an unknown node'}"
        yield _LONG, "slow", f"{of}: the others waited for it for {slow.share:.1%} of the time of the steps"
    if view.shards_by_rank:
        yield _LONG, "shards", shards_text(view.shards_by_rank)
    yield _REPORT, "checkpoints", f"{saved.committed} committed, {saved.failed} failed"
    yield _REPORT, "audits", f"{view.audits['done']} done, {view.audits['failed']} failed"
    yield _LONG, "rehearsals", _compared(view.rehearsals)
    yield _LONG, "overlaps", _compared(view.overlaps)
    if chosen:
        cost_ms, step_ms = chosen.cost_s * 1000, chosen.step_s * 1000
        cost = f"one costs {cost_ms:.1f} ms, and a step takes {step_ms:.0f} ms"
        yield _REPORT, "snapshots", f"interval {chosen.every}; {cost}"
    yield _REPORT, "final digest", view.end.digest or "-" if view.end else "-"
    for state in view.lineage:
        yield _REPORT, "begins from", f"step {state.step} of run {state.run_id} (digest {state.digest[:16]})"
    yield from _doubts(view)


def _doubts(view: RunView) -> _Facts:
    if view.not_restored:  # --json has their values
        yield _REPORT, "not restored", ", ".join(roots(view.not_restored))
    for differed in view.accepted:
        entry = next(iter(differed.entries), "its result")
        how = f"was done again and differed, first in {entry}; --accept took what came then"
        yield _REPORT, "accepted", f"step {differed.step} {how}"
    for again in view.replays:
        then, now = (loss_words(each, _REPLAY_DIGITS) for each in (again.loss_before, again.loss_now))
        losses = f"loss {then} then, {now} when it was done again"
        went = f"the run went on, since {again.excuse}" if again.excuse else "the run ended there"
        yield (
            _REPORT,
            "done again",
            f"step {again.step}, from the state of step {again.restored}: {losses}; {went}",
        )
    for edit in view.edits:
        yield _REPORT, "edited", f"after step {edit.step}: another text of the recipe"
    if view.logged_by_rank:
        yield _REPORT, "logged, of rank 0 alone", ", ".join(view.logged_by_rank)
    if view.unreadable_lines:
        lines = count(view.unreadable_lines, "line", "lines")
        yield _ALL, "metrics", f"{lines} cannot be read; those steps are in no figure"


def ended(how: str, stopped: Stopped | None) -> str:
    if stopped is None:
        return how
    return f"{how}, stopped by the recipe after step {stopped.step} of {stopped.steps} ({stopped.reason})"


def shards_text(shards: Sequence[int]) -> str:
    """How many ranks have how many, the fewest first: a thousand ranks fit into a line."""
    ranks = Counter(shards)
    return "; ".join(f"{number} on {count(ranks[number], 'rank', 'ranks')}" for number in sorted(ranks))


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def _compared(steps: ComparedSteps) -> str:
    return f"{steps.alike} of {steps.count} alike, {duration(steps.seconds)}" if steps.count else "none"


def short(text: str, most: int = MOST_LETTERS) -> str:
    """The text without what commands a terminal or reorders letters, cut at the end."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def shortened_at_front(text: str, most: int) -> str:
    """As `short`, of a text whose end says the most, such as a traceback."""
    shown = printable(text[-most - 1 :])
    return shown if len(shown) <= most else "…" + shown[1 - most :]


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
