"""What went wrong in a run, and what became of it: in order, and the faults with their costs.

An incident is one moment: a fault, a drain, a save that failed, a verdict on a state, the end.
Committed checkpoints are not among them. A fault ends a generation, or all of the run: a worker
failed, a node was lost, the ranks' states differed, or no node was left. Its cost is the time from
the last step that counts before it to the first one after it, as in goodput.py, together with the
time in which no group was there. Nodes that join, that leave, and planned stops are no faults.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from elastic import events as kinds
from elastic.observe.generation_end import (
    NODE_LOST,
    Start,
    ended_by_loss,
    failure_of,
    lost_nodes,
    nodes,
    why_ended,
)
from elastic.observe.generations import AT_ONCE, DOWN, Generation
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, first, last, of_kind
from elastic.observe.recovery import Recovery, recovery_line

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


def incidents(events: Events, generations: Sequence[Generation], state: str) -> list[Incident]:
    """In the order of their times. state: of the run, as in run_view.py."""
    found = [
        Incident(
            time=each.time,
            generation=each.generation,
            node=_machine_of(each),
            kind=kind_of(each.event),
            text=text,
        )
        for each in events
        if (text := text_of(each.event))
    ]
    found += [*_lost_nodes(events), *_without_a_word(events, generations, state)]
    return sorted(found, key=lambda each: each.time)


def lately(
    events: Events, shown: Sequence[Incident], begun: Sequence[Generation], recovered: Sequence[Recovery]
) -> list[Incident]:
    """The newest of all that a reader may be told, the oldest first: incidents, generations, what
    each recovery cost, and committed checkpoints.
    """
    found = [*shown[-_MOST_LATELY:]]
    for each in begun[-_MOST_LATELY:]:
        nodes, workers = len(each.nodes), each.world_size
        text = (
            f"generation {each.generation} ({each.cause}): {workers} worker{'' if workers == 1 else 's'} on"
            f" {nodes} node{'' if nodes == 1 else 's'}"
        )
        found.append(_of_rank_0(each, each.begins_s, "generation", text))
    of = {each.generation: each for each in begun}
    for place in range(max(0, len(recovered) - _MOST_LATELY), len(recovered)):
        one = recovered[place]
        if (text := recovery_line(recovered[: place + 1])) and one.ended_s is not None:
            found.append(_of_rank_0(of[one.generation], one.ended_s, "recovery", text))
    found += [
        Incident(
            time=each.time,
            generation=each.generation,
            node=each.node,
            kind="checkpoint",
            text=f"checkpoint of step {each.event.step} committed",
        )
        for each in of_kind(events, kinds.CheckpointCommitted)[-_MOST_LATELY:]
    ]
    return sorted(found, key=lambda each: each.time)[-_MOST_LATELY:]


def _of_rank_0(of: Generation, time: float, kind: str, text: str) -> Incident:
    node = of.nodes[0] if of.nodes else ""
    return Incident(time=time, generation=of.generation, node=node, kind=kind, text=text)


def faults(events: Events, generations: Sequence[Generation], state: str) -> list[Fault]:
    """In the order of their generations."""
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    wrong = {each.event.step: ", ".join(each.event.nodes) for each in of_kind(events, kinds.DivergenceJudged)}
    found = []
    for start, after, before, now in zip_longest(starts, starts[1:], generations, generations[1:]):
        then = own[start.generation]
        told = _end_of_all(then, start, state) if now is None else _end(then, start, after, before, wrong)
        if told is not None:
            event, node, what = told
            found.append(
                Fault(
                    time=before.ends_s if event is None else event.time,
                    generation=before.generation,
                    step=before.last_step,
                    node=node,
                    what=what,
                    cost_s=None if now is None else _cost_s(before, now),
                )
            )
    return found


# The event that tells of a fault, the node, and what happened.
_Told = tuple[LoggedEvent[kinds.Event] | None, str, str]


def _end(
    own: Events, start: Start, after: Start, before: Generation, wrong: Mapping[int, str]
) -> _Told | None:
    """What ended a generation before the next one; None unless it was a fault. own: its events.

    wrong: by step, the nodes whose states were wrong after it.
    """
    if before.gap == DOWN:
        return _down(own, start)
    noticed = first(own, kinds.GenerationEnded)
    if after.event.cause == NODE_LOST:
        return noticed, ", ".join(lost_nodes(own, start, after)), why_ended(own, start, after)
    differed = first(own, kinds.DivergenceDetected)
    if after.event.cause == "ranks differed" and differed is not None:
        return differed, wrong.get(differed.event.step, ""), text_of(differed.event)
    if after.event.cause not in ("failure", "ranks differed"):
        return None
    failed = failure_of(own)
    return (noticed, "", "failure") if failed is None else (failed[0], failed[0].node, failed[1])


def _end_of_all(own: Events, start: Start, state: str) -> _Told | None:
    """What ended the newest generation. own: its events."""
    if state in ("failed", "interrupted"):
        return _down(own, start)
    noticed = ended_by_loss(own)
    if state != "running" or noticed is None:
        return None
    return noticed, "", "a node was lost, and the others wait"  # another one may be about to write


def _down(own: Events, start: Start) -> _Told:
    """Why no node was left after a generation."""
    failed, left = last(own, kinds.RunFailed), last(own, kinds.RunInterrupted)
    if failed is not None:
        return failed, failed.node, f"the run failed: {first_line(failed.event.reason)}"
    if left is None or not left.event.gave_up:
        return None, "", NO_ANSWER
    reason = f"the group gave up: {first_line(left.event.reason)}"
    if lost := lost_nodes(own, start, None):
        return ended_by_loss(own), ", ".join(lost), f"{nodes(lost)} lost; {reason}"
    return left, left.node, reason


def _cost_s(before: Generation, now: Generation) -> float:
    lost_s = before.ends_s - (before.begins_s if before.trained_s is None else before.trained_s)
    if before.gap != AT_ONCE:
        lost_s += now.begins_s - before.ends_s
    return max(0.0, lost_s) + (0.0 if now.trains_s is None else max(0.0, now.trains_s - now.begins_s))


def _lost_nodes(events: Events) -> Iterator[Incident]:
    """A node that dies or is cut off writes nothing: the generations before and after tell of it.

    The time is when the others noticed. Which node it was is not said while they wait: another one
    may be about to write.
    """
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    for start, after in zip_longest(starts, starts[1:]):
        then = own[start.generation]
        if after is None and last(then, kinds.RunInterrupted) is None:
            continue
        noticed = first(then, kinds.GenerationEnded) or after or start
        for node in lost_nodes(then, start, after):
            yield Incident(
                time=noticed.time,
                generation=start.generation,
                node=node,
                kind="fault",
                text=f"node lost: {node}",
            )


def _without_a_word(events: Events, generations: Sequence[Generation], state: str) -> Iterator[Incident]:
    """Where the last node died without a word, and the run was resumed later, or never."""
    said = {
        each.generation
        for each in events
        if isinstance(each.event, kinds.RunFailed | kinds.RunFinished)
        or (isinstance(each.event, kinds.RunInterrupted) and each.event.gave_up)
    }
    for each, is_last in zip(generations, [*[False] * (len(generations) - 1), True], strict=False):
        if each.generation not in said and (each.gap == DOWN or (is_last and state == "interrupted")):
            yield Incident(
                time=each.ends_s, generation=each.generation, node="", kind="fault", text=NO_ANSWER
            )


def _machine_of(logged: LoggedEvent[kinds.Event]) -> str:
    """Where it happened: of a state that differed not where it was found."""
    if isinstance(logged.event, kinds.DivergenceJudged):
        return logged.event.nodes[0] if len(logged.event.nodes) == 1 else ""
    return "" if isinstance(logged.event, kinds.DivergenceDetected) else logged.node


def text_of(event: kinds.Event) -> str:
    """What the event says; empty for hidden ones."""
    rule = _RULES.get(type(event))
    return "" if rule is None else rule[1](event)


def kind_of(event: kinds.Event) -> str:
    """To give up is no drain: no request to leave had come."""
    gave_up = isinstance(event, kinds.RunInterrupted) and event.gave_up
    return "fault" if gave_up else _RULES[type(event)][0]


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


# What each kind of event is shown as: the sign, and what it says; an event that is not here is not
# shown.
_RULES: dict[type[kinds.Event], tuple[str, Callable[[Any], str]]] = {
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
