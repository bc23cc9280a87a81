"""What went wrong in a run, and what became of it: in order, and the faults with their costs.

An incident is one moment of which a reader is told. A fault ends a generation, or all of the run: a
worker failed, a node was lost, the ranks' states differed, or no node was left. Its cost is the
time from the last step that counts before it to the first one after it, as in goodput.py, together
with the time in which no group was there. Nodes that join, that leave, and planned stops are no
faults.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic import events as kinds
from elastic.observe.generations import (
    AT_ONCE,
    DOWN,
    NODE_LOST,
    Generation,
    ended_by_loss,
    failure_of,
    lost_nodes,
    nodes,
)
from elastic.observe.logged_event import Events, LoggedEvent, first, last, of_kind
from elastic.observe.recovery import Recovery

NO_ANSWER = "no node answered"  # all were gone, or stood still: no event tells which


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """time: seconds since 1970. node: where it happened, empty where that is not known.

    kind: fault, drain, save, state, end, generation, recovery or checkpoint.
    """

    time: float
    generation: int
    node: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What ended a generation. time: seconds since 1970. step: the last one before it.

    node: whose fault it was, or several by commas; empty where that is not known. cost_s: None for
    what ended the run, since that is not over.
    """

    time: float
    generation: int
    step: int | None
    node: str
    what: str
    cost_s: float | None
    is_told: bool = True


def incidents(events: Events, faults: Sequence[Fault], recovered: Sequence[Recovery]) -> list[Incident]:
    """In the order of their times."""
    rank_0 = {each.generation: each.node for each in of_kind(events, kinds.GenerationStarted)}
    found = [_of_event(each) for each in events if type(each.event) in _RULES]
    # A node that dies or is cut off writes nothing; the next generation tells of it.
    found += [
        Incident(time=each.time, generation=each.generation, node=each.node, kind="fault", text=each.what)
        for each in faults
        if not each.is_told
    ]
    found += [
        Incident(
            time=each.ended_s,
            generation=each.generation,
            node=rank_0.get(each.generation, ""),
            kind="recovery",
            text=each.line,
        )
        for each in recovered
        if each.ended_s is not None
    ]
    return sorted((each for each in found if each.text), key=lambda each: each.time)


def _of_event(each: LoggedEvent[kinds.Event]) -> Incident:
    """Its text may be empty. Where a state differed is not where that was found."""
    (kind, words), node = _RULES[type(each.event)], each.node
    match each.event:
        case kinds.RunInterrupted(gave_up=True):
            kind = "fault"  # no request to leave had come
        case kinds.DivergenceJudged(nodes=nodes):
            node = nodes[0] if len(nodes) == 1 else ""
        case kinds.DivergenceDetected():
            node = ""
        case _:
            pass
    return Incident(time=each.time, generation=each.generation, node=node, kind=kind, text=words(each.event))


def faults(events: Events, generations: Sequence[Generation], state: str) -> list[Fault]:
    """In the order of their generations. state: of the run, as in run_view.py."""
    wrong = {each.event.step: ", ".join(each.event.nodes) for each in of_kind(events, kinds.DivergenceJudged)}
    found = []
    for each, now in zip(generations, [*generations[1:], None], strict=False):
        told = _end_of_all(each, state) if now is None else _end(each, now, wrong)
        if told is not None:
            event, node, what = told
            found.append(
                Fault(
                    time=each.ends_s if event is None else event.time,
                    generation=each.generation,
                    step=each.last_step,
                    node=node,
                    what=what,
                    cost_s=None if now is None else _cost_s(each, now),
                    is_told=event is not None and not isinstance(event.event, kinds.GenerationEnded),
                )
            )
    return found


# The event that tells of a fault, the node, and what happened.
_Told = tuple[LoggedEvent[kinds.Event] | None, str, str]


def _end(before: Generation, now: Generation, wrong: Mapping[int, str]) -> _Told | None:
    """What ended a generation before the next one; None unless it was a fault.

    wrong: by step, the nodes whose states were wrong after it.
    """
    if before.gap == DOWN:
        return _down(before)
    noticed = first(before.own, kinds.GenerationEnded)
    if now.cause == NODE_LOST:
        return noticed, ", ".join(lost_nodes(before)), now.why
    differed = first(before.own, kinds.DivergenceDetected)
    if now.cause == "ranks differed" and differed is not None:
        words = f"ranks differ after step {differed.event.step}"
        return differed, wrong.get(differed.event.step, ""), words
    if now.cause not in ("failure", "ranks differed"):
        return None
    failed = failure_of(before.own)
    return (noticed, "", "failure") if failed is None else (failed[0], failed[0].node, failed[1])


def _end_of_all(newest: Generation, state: str) -> _Told | None:
    if state in ("failed", "interrupted"):
        return _down(newest)
    noticed = ended_by_loss(newest.own)
    if state != "running" or noticed is None:
        return None
    return noticed, "", "a node was lost, and the others wait"  # another one may be about to write


def _down(before: Generation) -> _Told:
    """Why no node was left after a generation."""
    failed, left = last(before.own, kinds.RunFailed), last(before.own, kinds.RunInterrupted)
    if failed is not None:
        return failed, failed.node, f"the run failed: {first_line(failed.event.reason)}"
    if left is None or not left.event.gave_up:
        return None, "", NO_ANSWER
    reason = f"the group gave up: {first_line(left.event.reason)}"
    if lost := lost_nodes(before):
        return ended_by_loss(before.own), ", ".join(lost), f"{nodes(lost)} lost; {reason}"
    return left, left.node, reason


def _cost_s(before: Generation, now: Generation) -> float:
    lost_s = before.ends_s - (before.begins_s if before.trained_s is None else before.trained_s)
    if before.gap != AT_ONCE:
        lost_s += now.begins_s - before.ends_s
    return max(0.0, lost_s) + (0.0 if now.trains_s is None else max(0.0, now.trains_s - now.begins_s))


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _started(event: kinds.GenerationStarted) -> str:
    workers, nodes = event.world_size, len(event.nodes)
    return (
        f"a generation begins ({event.cause}): {workers} worker{'' if workers == 1 else 's'} on"
        f" {nodes} node{'' if nodes == 1 else 's'}"
    )


def _left(event: kinds.RunInterrupted) -> str:
    how = f"gave up ({event.reason})" if event.gave_up else "left"
    return f"{how}; newest checkpoint at step {event.step}" if event.step else how


def _exited(event: kinds.WorkerExited) -> str:
    """Empty where it ended as it should, or because another one had failed."""
    if event.victim or (event.signal is None and event.code in (0, 75)):
        return ""
    how = event.signal if event.signal is not None else f"exit code {event.code}"
    return f"rank {event.rank} ended: {how}"


# What an event is shown as: the sign, and what it says, empty where it is not shown.
_Rule = tuple[str, Callable[[Any], str]]
_RULES: dict[type[kinds.Event], _Rule] = {
    kinds.GenerationStarted: ("generation", _started),
    kinds.CheckpointCommitted: ("checkpoint", lambda event: f"checkpoint of step {event.step} committed"),
    kinds.FaultInjected: ("fault", lambda event: f"injected: {event.fault}"),
    kinds.WorkerExited: ("fault", _exited),
    kinds.WorkerFailed: ("fault", lambda event: f"rank {event.rank}: {event.message}"),
    kinds.HangDetected: ("fault", lambda event: f"rank {event.rank} hangs: {event.reason}"),
    kinds.UploaderDied: ("save", lambda event: f"the uploader ended: {event.reason}"),
    kinds.CheckpointFailed: ("save", lambda event: f"save of step {event.step} failed: {event.reason}"),
    kinds.CheckpointFenced: ("save", lambda event: f"save of step {event.step} dropped: {event.reason}"),
    kinds.CheckpointDiffers: ("save", lambda event: f"save of step {event.step} differs: {event.reason}"),
    kinds.CheckpointRejected: (
        "save",
        lambda event: f"checkpoint of step {event.step} not used: {event.reason}",
    ),
    kinds.SnapshotRejected: ("save", lambda event: f"snapshot of step {event.step} not used: {event.reason}"),
    kinds.DrainRequested: ("drain", lambda event: f"drain: {event.reason}"),
    kinds.RunInterrupted: ("drain", _left),
    kinds.ShardsMoved: (
        "state",
        lambda event: f"shards of the ranks from step {event.step} on: {', '.join(map(str, event.shards))}",
    ),
    kinds.AuditFailed: ("state", lambda event: f"audit of step {event.step}: shard {event.shard} differed"),
    kinds.DivergenceDetected: ("state", lambda event: f"ranks differ after step {event.step}"),
    kinds.DivergenceJudged: (
        "state",
        lambda event: f"step {event.step} judged: {event.verdict} {', '.join(event.nodes)}",
    ),
    kinds.ReplayDiffered: ("state", lambda event: f"step {event.step} gave another result when done again"),
    kinds.RecipeEdited: ("state", lambda event: f"the recipe was edited after step {event.step}"),
    kinds.Stopped: ("end", lambda event: f"stopped by the recipe: {event.reason}"),
    kinds.RunFailed: ("end", lambda event: f"failed, exit code {event.exit_code}: {event.reason}"),
    kinds.RunFinished: (
        "end",
        lambda event: f"finished after step {event.steps}" if event.steps else "finished",
    ),
}
