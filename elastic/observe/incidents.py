"""What went wrong in a run, and what became of it: in order, and the faults with their costs.

An incident is one moment: a fault, a drain, a save that failed, a verdict on a state, the end.
Committed checkpoints are not among them. A fault ends a generation, or all of the run: a worker
failed, a node was lost, the ranks' states differed, or no node was left. Its cost is the time from
the last step that counts before it to the first one after it, as in goodput.py, together with the
time in which no group was there. Nodes that join, that leave, and planned stops are no faults.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

_MOST_LATELY = 8
NO_ANSWER = "no node answered"  # all were gone, or stood still: no event tells which


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """time: seconds since 1970. node: where it happened, empty where that is not known.

    kind: fault, drain, save, state or end; of `lately`, generation, recovery and checkpoint too.
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


def incidents(events: Events, faults: Sequence[Fault]) -> list[Incident]:
    """In the order of their times."""
    found = [_of_event(each, _RULES[type(each.event)]) for each in events if type(each.event) in _RULES]
    return sorted([*filter(None, found), *_without_a_word(faults)], key=lambda each: each.time)


def _of_event(each: LoggedEvent[kinds.Event], rule: "_Rule") -> Incident | None:
    kind, words = rule
    text = words(each.event)
    if isinstance(each.event, kinds.RunInterrupted) and each.event.gave_up:
        kind = "fault"  # no request to leave had come
    node = _machine_of(each)
    return (
        Incident(time=each.time, generation=each.generation, node=node, kind=kind, text=text)
        if text
        else None
    )


def _without_a_word(faults: Sequence[Fault]) -> Iterator[Incident]:
    """A node that dies or is cut off writes nothing; the next generation tells of it."""
    for each in faults:
        if not each.is_told:
            yield Incident(
                time=each.time, generation=each.generation, node=each.node, kind="fault", text=each.what
            )


def lately(
    events: Events, shown: Sequence[Incident], begun: Sequence[Generation], recovered: Sequence[Recovery]
) -> list[Incident]:
    """The newest of all that a reader may be told, the oldest first: incidents, generations, what
    each recovery cost, and committed checkpoints.
    """
    found = [*shown[-_MOST_LATELY:]]
    rank_0 = {each.generation: each.start.node for each in begun}

    def add(time: float, generation: int, kind: str, text: str) -> None:
        node = rank_0.get(generation, "")
        found.append(Incident(time=time, generation=generation, node=node, kind=kind, text=text))

    for each in begun[-_MOST_LATELY:]:
        number, size, size_nodes = each.generation, each.world_size, len(each.nodes)
        of = f"{size} worker{'' if size == 1 else 's'} on {size_nodes} node{'' if size_nodes == 1 else 's'}"
        add(each.begins_s, number, "generation", f"generation {number} ({each.cause}): {of}")
    for one in recovered[-_MOST_LATELY:]:
        if one.line and one.ended_s is not None:
            add(one.ended_s, one.generation, "recovery", one.line)
    for saved in of_kind(events, kinds.CheckpointCommitted)[-_MOST_LATELY:]:
        text = f"checkpoint of step {saved.event.step} committed"
        add(saved.time, saved.generation, "checkpoint", text)
    return sorted(found, key=lambda each: each.time)[-_MOST_LATELY:]


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


def _machine_of(logged: LoggedEvent[kinds.Event]) -> str:
    """Where it happened: of a state that differed not where it was found."""
    if isinstance(logged.event, kinds.DivergenceJudged):
        return logged.event.nodes[0] if len(logged.event.nodes) == 1 else ""
    return "" if isinstance(logged.event, kinds.DivergenceDetected) else logged.node


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


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
