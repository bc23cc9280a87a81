"""What a reader is told of a run, in order: faults, recoveries, saves, verdicts and the end.

A node that dies or is cut off writes nothing: the generations before and after it tell. It does not
promise to know why a run has ended without a word.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from elastic import events as kinds
from elastic.observe.generations import DOWN, Generation, failure_text, lost_nodes
from elastic.observe.logged_event import Events, LoggedEvent, first, last
from elastic.observe.recovery import Recovery

NO_ANSWER = "no node answered"  # all were gone, or stood still: no event tells which


class Incident(NamedTuple):
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
    found = [_of_event(each) for each in events if type(each.event) in _RULES]
    rank_0 = {each.generation: each.start.node for each in generations}
    for back in recovered:
        if back.ended_s is not None:
            node = rank_0[back.generation]
            found.append(Incident(back.ended_s, back.generation, node, "recovery", back.line))
    for each in generations:
        found += _without_a_word(each, state)
    return sorted((each for each in found if each.text), key=lambda each: each.time)


def _of_event(each: LoggedEvent[kinds.Event]) -> Incident:
    """Its text may be empty. Where a state differed is not where that was found."""
    (kind, words), event = _RULES[type(each.event)], each.event
    if isinstance(event, kinds.RunInterrupted) and event.gave_up:
        kind = "fault"  # no request to leave had come
    node = "" if isinstance(event, kinds.DivergenceDetected | kinds.DivergenceJudged) else each.node
    text = words.format(event) if isinstance(words, str) else words(event)
    return Incident(each.time, each.generation, node, kind, text)


def _without_a_word(of: Generation, state: str) -> Iterator[Incident]:
    """Nodes that were lost, and the end of all of them. While the others wait, no node is blamed:
    another one may be about to write.
    """
    noticed = first(of.own, kinds.GenerationEnded) or of.after or of.start
    is_over = of.after is not None or last(of.own, kinds.RunInterrupted) is not None
    found = [(noticed.time, node, f"node {node} lost") for node in (lost_nodes(of) if is_over else [])]
    goodbyes = [each.event for each in of.own if isinstance(each.event, kinds.GOODBYES)]
    is_told = any(getattr(each, "gave_up", True) for each in goodbyes)
    if not is_told and (of.gap == DOWN or (of.after is None and state == "interrupted")):
        found.append((of.ends_s, "", NO_ANSWER))
    for time, node, text in found:
        yield Incident(time, of.generation, node, "fault", text)


def _left(event: kinds.RunInterrupted) -> str:
    how = f"gave up ({event.reason})" if event.gave_up else "left"
    return f"{how}; newest checkpoint at step {event.step}" if event.step else how


def _judged(event: kinds.DivergenceJudged) -> str:
    return f"step {event.step} judged: {event.verdict} {', '.join(event.nodes)}"


def _finished(event: kinds.RunFinished) -> str:
    return f"finished after step {event.steps}" if event.steps else "finished"


# What an event is shown as: the sign, and what it says of the event, empty where it is not shown.
_RULES: dict[type[kinds.Event], tuple[str, str | Callable[[Any], str]]] = {
    kinds.GenerationStarted: ("generation", "a generation begins ({0.cause}), world size {0.world_size}"),
    kinds.CheckpointCommitted: ("checkpoint", "checkpoint of step {0.step} committed"),
    kinds.FaultInjected: ("fault", "injected: {0.fault}"),
    kinds.WorkerExited: ("fault", failure_text),
    kinds.WorkerFailed: ("fault", failure_text),
    kinds.HangDetected: ("fault", failure_text),
    kinds.StandbyEnded: ("fault", "a standby worker ended: {0.reason}"),
    kinds.UploaderDied: ("save", "the uploader ended: {0.reason}"),
    kinds.CheckpointFailed: ("save", "save of step {0.step} failed: {0.reason}"),
    kinds.CheckpointFenced: ("save", "save of step {0.step} dropped: {0.reason}"),
    kinds.CheckpointDiffers: ("save", "save of step {0.step} differs: {0.reason}"),
    kinds.CheckpointRejected: ("save", "checkpoint of step {0.step} not used: {0.reason}"),
    kinds.SnapshotRejected: ("save", "snapshot of step {0.step} not used: {0.reason}"),
    kinds.DrainRequested: ("drain", "drain: {0.reason}"),
    kinds.RunInterrupted: ("drain", _left),
    kinds.ShardsMoved: ("state", "shards of the ranks from step {0.step} on: {0.shards}"),
    kinds.AuditFailed: ("state", "audit of step {0.step}: shard {0.shard} differed"),
    kinds.DivergenceDetected: ("state", "ranks differ after step {0.step}"),
    kinds.DivergenceJudged: ("state", _judged),
    kinds.ReplayDiffered: ("state", "step {0.step} gave another result when done again"),
    kinds.RecipeEdited: ("state", "the recipe was edited after step {0.step}"),
    kinds.Stopped: ("end", "stopped by the recipe: {0.reason}"),
    kinds.RunFailed: ("end", "failed, exit code {0.exit_code}: {0.reason}"),
    kinds.RunFinished: ("end", _finished),
}
