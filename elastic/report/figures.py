"""Every figure of a run's view that is shown by name: once as JSON, and once in words.

A new figure is a line in `report_json` or `status_json`, which scripts rely on, and a line in
`_FACTS`, from which report, status, watch and page take what they show. Texts of a run are foreign
here; they are escaped where they are shown.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic.events import Stopped
from elastic.observe.doubts import ComparedSteps
from elastic.observe.run_view import RunView
from elastic.observe.step_line import loss_words
from elastic.report.words import count, duration

_REPLAY_DIGITS = 9  # those of a 32-bit float, so that two losses that differ look different
_GENERATION = ("generation", "world_size", "nodes", "first_step", "last_step", "cause")


def report_json(view: RunView) -> dict[str, Any]:
    """The object of `report --json`; see RunView."""
    spent, saved = view.time, view.checkpoints
    return {
        "finished": view.is_finished,
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
        "last_checkpoint": {"step": saved.step, "age_s": max(0.0, view.now_s - saved.time)}
        if saved
        else None,
        "stopped": view.stopped,
        "plain": view.plain,
    }


def facts(view: RunView, where: str) -> dict[str, str]:
    """What is shown beside the tables, by label. where: report, status or watch."""
    table = _FACTS if view.plain is None else _PLAIN_FACTS
    found = {label: words(view) for label, (places, words) in table.items() if where in places}
    return {label: text for label, text in found.items() if text}


def ended(how: str, stopped: Stopped | None) -> str:
    if stopped is None:
        return how
    return f"{how}, stopped by the recipe after step {stopped.step} of {stopped.steps} ({stopped.reason})"


def seconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def shards_text(shards: Sequence[int]) -> str:
    """How many ranks have how many, the fewest first: a thousand ranks fit into a line."""
    ranks = Counter(shards)
    return "; ".join(f"{number} on {count(ranks[number], 'rank', 'ranks')}" for number in sorted(ranks))


def _saved(view: RunView) -> str:
    saved = view.checkpoints.newest
    return f"step {saved.step}, {duration(max(0.0, view.now_s - saved.time))} ago" if saved else "none"


def _lost_to(view: RunView) -> str:
    """The longest first."""
    badput_s: Mapping[str, float] = view.time.badput_s if view.time else {}
    parts = sorted(badput_s.items(), key=lambda part: -part[1])
    return ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in parts) or "nothing"


def _compared(steps: ComparedSteps) -> str:
    return f"{steps.alike} of {steps.count} alike, {duration(steps.seconds)}" if steps.count else "none"


def _snapshots(view: RunView) -> str:
    chosen = view.snapshots
    if chosen is None:
        return "as --snapshot-every says"
    cost_ms, step_ms = chosen.cost_s * 1000, chosen.step_s * 1000
    return f"interval {chosen.every}; one costs {cost_ms:.1f} ms, and a step takes {step_ms:.0f} ms"


def _replays(view: RunView) -> str:
    def loss(value: float | None) -> str:
        return loss_words(value, _REPLAY_DIGITS)

    return "\n".join(
        f"step {each.step}, from the state of step {each.restored}: loss {loss(each.loss_before)} then,"
        f" {loss(each.loss_now)} when it was done again;"
        f" {f'the run went on, since {each.excuse}' if each.excuse else 'the run ended there'}"
        for each in view.replays
    )


def _plain(view: RunView) -> str:
    causes = (
        ", ".join(f"{number} {cause}" for cause, number in view.plain.restarts.items()) if view.plain else ""
    )
    return f"{sum(view.plain.restarts.values()) if view.plain else 0}{f' ({causes})' if causes else ''}"


# By label: where it is shown, and in what words; without a word it is left out.
_Facts = dict[str, tuple[tuple[str, ...], Callable[[RunView], str]]]
_ALL = ("report", "status", "watch")
_HEAD: _Facts = {
    "state": (("report", "status"), lambda view: ended(view.state, view.stopped)),
    "generation": (
        ("status", "watch"),
        lambda view: f"{view.generation}, {count(view.world_size, 'worker', 'workers')}",
    ),
    "failed": (
        _ALL,
        lambda view: f"exit code {view.failed.exit_code}: {view.failed.reason}" if view.failed else "",
    ),
}
_PLAIN_FACTS: _Facts = _HEAD | {
    "script": (_ALL, lambda _: "does not import elastic: its steps and states are its own"),
    "restarts": (_ALL, _plain),
    "last exit": (_ALL, lambda view: view.plain.last_exit or "-" if view.plain else ""),
    "time": (_ALL, lambda view: f"{view.plain.running_s:.1f} s in its generations" if view.plain else ""),
}
_FACTS: _Facts = _HEAD | {
    "step": (_ALL, lambda view: f"{view.step} of {view.length or 'an unknown number'}"),
    "epochs": (("report",), lambda view: f"{view.epochs} complete"),
    "loss": (("watch",), lambda view: loss_words(view.newest.loss if view.newest else None)),
    "last checkpoint": (("status", "watch"), _saved),
    "lost steps": (("report",), lambda view: str(view.lost_steps)),
    "goodput": (
        ("report", "watch"),
        lambda view: (
            "unknown" if view.time is None or view.time.goodput is None else f"{view.time.goodput:.1%}"
        ),
    ),
    "lost to": (("report", "watch"), _lost_to),
    "step time": (
        ("report", "watch"),
        lambda view: (
            f"median {seconds_text(view.step_time_s['median'])}, p99 {seconds_text(view.step_time_s['p99'])}"
        ),
    ),
    "slow": (
        ("report", "watch"),
        lambda view: "\n".join(
            f"rank {each.rank} on {each.node or 'an unknown node'}: the others waited for it for"
            f" {each.share:.1%} of the time of the steps"
            for each in view.slow_ranks
        ),
    ),
    "shards": (("report", "watch"), lambda view: shards_text(view.shards_by_rank)),
    "checkpoints": (
        ("report",),
        lambda view: f"{view.checkpoints.committed} committed, {view.checkpoints.failed} failed",
    ),
    "audits": (("report",), lambda view: f"{view.audits['done']} done, {view.audits['failed']} failed"),
    "rehearsals": (("report", "watch"), lambda view: _compared(view.rehearsals)),
    "overlaps": (("report", "watch"), lambda view: _compared(view.overlaps)),
    "snapshots": (("report",), _snapshots),
    "final digest": (("report",), lambda view: view.end.digest or "-" if view.end else "-"),
    "begins from": (
        ("report",),
        lambda view: "\n".join(
            f"step {each.step} of run {each.run_id} (digest {each.digest[:16]})" for each in view.lineage
        ),
    ),
    "not restored": (
        ("report",),
        lambda view: "\n".join(f"{name}: {values}" for name, values in view.not_restored.items()),
    ),
    "accepted": (
        ("report",),
        lambda view: "\n".join(
            f"step {each.step} was done again and differed, first in {next(iter(each.entries), 'its result')};"
            " --accept took what came then"
            for each in view.accepted
        ),
    ),
    "done again": (("report",), _replays),
    "edited": (
        ("report",),
        lambda view: "\n".join(f"after step {each.step}: another text of the recipe" for each in view.edits),
    ),
    "logged, of rank 0 alone": (("report",), lambda view: ", ".join(view.logged_by_rank)),
    "metrics": (
        _ALL,
        lambda view: (
            f"{count(view.unreadable_lines, 'line', 'lines')} cannot be read; those steps are in no figure"
            if view.unreadable_lines
            else ""
        ),
    ),
}
