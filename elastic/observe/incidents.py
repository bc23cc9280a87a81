"""What a reader is told of a run, in order: faults, recoveries, saves, verdicts and the end.

A node that dies or is cut off writes nothing: the generations before and after it tell. It does not
promise to know why a run has ended without a word.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic import events as kinds
from elastic.observe.generations import DOWN, Generation, failure_text, lost_nodes
from elastic.observe.logged_event import Events, LoggedEvent, first, last
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


def incidents(
    events: Events, generations: Sequence[Generation], recovered: Sequence[Recovery], state: str
) -> list[Incident]:
    """In the order of their times. state: of the run, as in run_view.py."""
    rank_0 = {each.generation: each.start.node for each in generations}
    found = [_of_event(each) for each in events if type(each.event) in _RULES]
    found += [
        Incident(
            time=each.ended_s,
            generation=each.generation,
            node=rank_0[each.generation],
            kind="recovery",
            text=each.line,
        )
        for each in recovered
        if each.ended_s is not None
    ]
    for each in generations:
        found += _without_a_word(each, state)
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


def _without_a_word(of: Generation, state: str) -> Iterator[Incident]:
    """Nodes that were lost, and the end of all of them. While the others wait, no node is blamed:
    another one may be about to write.
    """
    noticed = first(of.own, kinds.GenerationEnded) or of.after or of.start
    is_over = of.after is not None or last(of.own, kinds.RunInterrupted) is not None
    found = [(noticed.time, node, f"node {node} lost") for node in (lost_nodes(of) if is_over else [])]
    is_told = any(
        isinstance(each.event, kinds.RunFailed | kinds.RunFinished)
        or (isinstance(each.event, kinds.RunInterrupted) and each.event.gave_up)
        for each in of.own
    )
    if not is_told and (of.gap == DOWN or (of.after is None and state == "interrupted")):
        found.append((of.ends_s, "", NO_ANSWER))
    for time, node, text in found:
        yield Incident(time=time, generation=of.generation, node=node, kind="fault", text=text)


def _started(event: kinds.GenerationStarted) -> str:
    workers, nodes = event.world_size, len(event.nodes)
    return (
        f"a generation begins ({event.cause}): {workers} worker{'' if workers == 1 else 's'} on"
        f" {nodes} node{'' if nodes == 1 else 's'}"
    )


def _left(event: kinds.RunInterrupted) -> str:
    how = f"gave up ({event.reason})" if event.gave_up else "left"
    return f"{how}; newest checkpoint at step {event.step}" if event.step else how


# What an event is shown as: the sign, and what it says, empty where it is not shown.
_Rule = tuple[str, Callable[[Any], str]]
_RULES: dict[type[kinds.Event], _Rule] = {
    kinds.GenerationStarted: ("generation", _started),
    kinds.CheckpointCommitted: ("checkpoint", lambda event: f"checkpoint of step {event.step} committed"),
    kinds.FaultInjected: ("fault", lambda event: f"injected: {event.fault}"),
    kinds.WorkerExited: ("fault", failure_text),
    kinds.WorkerFailed: ("fault", failure_text),
    kinds.HangDetected: ("fault", failure_text),
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
