"""What the report says beside its tables, by label: for a terminal, and for the page.

Texts of a run are foreign here; they are escaped where they are shown.
"""

from collections.abc import Mapping, Sequence

from elastic.config.parent import Ancestor
from elastic.events import RecipeEdited, ReplayDiffered, SnapshotInterval, StepDiffered, Stopped
from elastic.observe.run_view import ComparedSteps, PlainScript, RunView
from elastic.observe.slow_ranks import SlowRank
from elastic.observe.step_line import loss_words

_MOST_RANKS = 8  # named for one number of shards
_REPLAY_DIGITS = 9  # those of a 32-bit float, so that two losses that differ look different


def report_facts(view: RunView) -> dict[str, str]:
    """What the report says beside its tables, by label."""
    if view.plain is not None:
        return {"state": view.state} | plain_facts(view.plain)
    how = {"finished": ended("yes" if view.end else "no", view.stopped)}
    step_time, checkpoints, failed, spent = view.step_time_s, view.checkpoints, view.failed, view.time
    return (
        how
        | ({"failed": f"exit code {failed.exit_code}: {failed.reason}"} if failed else {})
        | {
            "steps": str(view.step),
            "epochs": f"{view.epochs} complete",
            "lost steps": str(view.lost_steps),
            "goodput": "unknown" if spent is None or spent.goodput is None else f"{spent.goodput:.1%}",
            "lost to": _badput(spent.badput_s if spent else {}),
            "step time": f"median {value_text(step_time.median, ' s')}, p99 {value_text(step_time.p99, ' s')}",
        }
        | _slow_ranks(view.slow_ranks)
        | ({"shards": shards_text(view.shards_by_rank)} if view.shards_by_rank else {})
        | {
            "checkpoints": f"{checkpoints.committed} committed, {checkpoints.failed} failed",
            "audits": f"{view.audits.done} done, {view.audits.failed} failed",
            "rehearsals": compared(view.rehearsals),
            "overlaps": compared(view.overlaps),
            "snapshots": _snapshots(view.snapshots),
            "final digest": value_text(view.end.digest or None if view.end else None),
        }
        | _lineage(view.lineage)
        | _listed("not restored", [f"{name}: {values}" for name, values in view.not_restored.items()])
        | _accepted(view.accepted)
        | _replays(view.replays)
        | _edits(view.edits)
        | _named("logged, of rank 0 alone", view.logged_by_rank)
        | _unreadable(view.unreadable_lines)
    )


def compared(steps: ComparedSteps) -> str:
    return f"{steps.alike} of {steps.count} alike, {steps.seconds:.1f} s" if steps.count else "none"


def _badput(badput_s: Mapping[str, float]) -> str:
    """The longest first."""
    parts = sorted(badput_s.items(), key=lambda part: -part[1])
    return ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in parts) or "nothing"


def _slow_ranks(found: list[SlowRank]) -> dict[str, str]:
    lines = [
        f"rank {each.rank} on {each.node or 'an unknown node'}: the others waited for it for {each.share:.1%} of the time of the steps"
        for each in found
    ]
    return _listed("slow", lines)


def _named(label: str, places: list[str]) -> dict[str, str]:
    """One line, if there are any."""
    return {label: ", ".join(places)} if places else {}


def _unreadable(count: int) -> dict[str, str]:
    lines = "1 line cannot" if count == 1 else f"{count} lines cannot"
    return {"metrics": f"{lines} be read; those steps are in no figure"} if count else {}


def _listed(label: str, lines: list[str]) -> dict[str, str]:
    """A fact of several lines, if there are any."""
    return {label: "\n".join(lines)} if lines else {}


def _replays(found: list[ReplayDiffered]) -> dict[str, str]:
    lines = [
        f"step {each.step}, from the state of step {each.restored}: loss {loss_words(each.loss_before, _REPLAY_DIGITS)} then, {loss_words(each.loss_now, _REPLAY_DIGITS)} when it was done again;"
        f" {f'the run went on, since {each.excuse}' if each.excuse else 'the run ended there'}"
        for each in found
    ]
    return _listed("done again", lines)


def _accepted(found: list[StepDiffered]) -> dict[str, str]:
    lines = [
        f"step {each.step} was done again and differed, first in {next(iter(each.entries), 'its result')}; --accept took what came then"
        for each in found
    ]
    return _listed("accepted", lines)


def _edits(found: list[RecipeEdited]) -> dict[str, str]:
    return _listed("edited", [f"after step {each.step}: another text of the recipe" for each in found])


def _lineage(lineage: list[Ancestor]) -> dict[str, str]:
    """One line for each state that the run descends from, the oldest first."""
    states = [f"step {each.step} of run {each.run_id} (digest {each.digest[:16]})" for each in lineage]
    return _listed("begins from", states)


def ended(how: str, stopped: Stopped | None) -> str:
    if stopped is None:
        return how
    return f"{how}, stopped by the recipe after step {stopped.step} of {stopped.steps} ({stopped.reason})"


def _snapshots(chosen: SnapshotInterval | None) -> str:
    if chosen is None:
        return "as --snapshot-every says"
    cost_ms, step_ms = chosen.cost_s * 1000, chosen.step_s * 1000
    return f"interval {chosen.every}; one costs {cost_ms:.1f} ms, and a step takes {step_ms:.0f} ms"


def value_text(value: object, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:.3f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def plain_facts(script: PlainScript) -> dict[str, str]:
    """By label."""
    causes = ", ".join(f"{number} {cause}" for cause, number in script.restarts.items())
    return {
        "script": "does not import elastic: its steps and states are its own",
        "restarts": f"{sum(script.restarts.values())}{f' ({causes})' if causes else ''}",
        "last exit": script.last_exit or "-",
        "time": f"{script.running_s:.1f} s with workers",
    }


def shards_text(shards: Sequence[int]) -> str:
    """For a reader: which ranks have how many, the fewest first."""
    of_counts: dict[int, list[int]] = {}
    for rank, count in enumerate(shards):
        of_counts.setdefault(count, []).append(rank)
    parts = []
    for count, ranks in sorted(of_counts.items()):
        named = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
        parts.append(f"{count} on rank{'s' if len(ranks) > 1 else ''} {named}")
    return "; ".join(parts)
