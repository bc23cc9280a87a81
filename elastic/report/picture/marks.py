"""What happened at one moment of a run: faults, drains, saves that failed, and verdicts.

Committed checkpoints are not among them: there are too many, and they have a chart of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from elastic import events as kinds
from elastic.observe.generation_end import lost_nodes
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, first, last, of_kind
from elastic.report.picture.generations import DOWN, Generation
from elastic.report.picture.words import short

NO_ANSWER = "no node answered"  # all were gone, or stood still: no event tells which

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """at: seconds since the run began. lane: the index of the node's lane, None without one.

    kind: fault, drain, save, state or end; it decides the sign, and `text` says the rest.
    """

    at: float
    lane: int | None
    kind: str
    text: str


def marks_of(events: Events, began: float, lane_of: Mapping[str, int]) -> list[Mark]:
    """In the order of their times. lane_of: by node."""
    found = [
        Mark(
            at=max(0.0, round(each.time - began, 3)),
            lane=lane_of.get(_machine_of(each)),
            kind=sign_of(each.event),
            text=short(text),
        )
        for each in events
        if (text := text_of(each.event))
    ]
    return sorted([*found, *_lost_nodes(events, began, lane_of)], key=lambda mark: mark.at)


def _machine_of(logged: LoggedEvent[kinds.Event]) -> str:
    """Where it happened: of a state that differed not where it was found."""
    if isinstance(logged.event, kinds.DivergenceJudged):
        return logged.event.nodes[0] if len(logged.event.nodes) == 1 else ""
    return "" if isinstance(logged.event, kinds.DivergenceDetected) else logged.node


def text_of(event: kinds.Event) -> str:
    """What the event says; empty for one that is not shown."""
    rule = _RULES.get(type(event))
    return "" if rule is None else rule[1](event)


def all_gone(generations: Sequence[Generation], events: Events, *, interrupted: bool) -> list[Mark]:
    """Where the last node died without a word, and the run was resumed later, or never."""
    said = {
        each.generation
        for each in events
        if isinstance(each.event, kinds.RunFailed | kinds.RunFinished)
        or (isinstance(each.event, kinds.RunInterrupted) and each.event.gave_up)
    }
    newest = [generations[-1]] if interrupted else []
    ended = [*(each for each in generations[:-1] if each.gap == DOWN), *newest]
    return [
        Mark(at=each.ends, lane=None, kind="fault", text=NO_ANSWER)
        for each in ended
        if each.number not in said
    ]


def both_ends(items: Sequence[T], most: int) -> tuple[list[T], int]:
    """The first and the last ones, `most` together, and how many are left out between."""
    if len(items) <= most:
        return [*items], 0
    half = most // 2
    return [*items[:half], *items[-half:]], len(items) - 2 * half


def sign_of(event: kinds.Event) -> str:
    """To give up is no drain: no request to leave had come."""
    gave_up = isinstance(event, kinds.RunInterrupted) and event.gave_up
    return "fault" if gave_up else _RULES[type(event)][0]


def _left(event: kinds.RunInterrupted) -> str:
    how = f"gave up ({event.reason})" if event.gave_up else "left"
    return f"{how}; newest checkpoint at step {event.step}" if event.step else how


def _lost_nodes(events: Events, began: float, lane_of: Mapping[str, int]) -> list[Mark]:
    """A node that dies or is cut off writes nothing: the generations before and after tell of it.

    The mark is where the others noticed. Which node it was is not said while they wait: another one
    may be about to write.
    """
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    found = []
    for start, after in zip_longest(starts, starts[1:]):
        then = own[start.generation]
        if after is None and last(then, kinds.RunInterrupted) is None:
            continue
        noticed = first(then, kinds.GenerationEnded) or after or start
        found += [
            Mark(
                at=max(0.0, round(noticed.time - began, 3)),
                lane=lane_of.get(node),
                kind="fault",
                text=short(f"node lost: {node}"),
            )
            for node in lost_nodes(then, start, after)
        ]
    return found


def _exited(event: kinds.WorkerExited) -> str:
    """Empty for one that ended as it should, or because another one had failed."""
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
