"""What went wrong in a run, and what it cost, the most expensive first.

A fault ends a generation, or all of the run: a worker failed, a node was lost, the ranks' states
differed, or no node was left.
Its cost is the time from the last step that counts before it to the first one after it, as in
goodput.py, together with the time in which no group was there. Nodes that join, that leave, and
planned stops are no faults. What cost no generation, such as a save that failed, comes last.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from elastic import events as kinds
from elastic.observe.generation_end import NODE_LOST, Start, ended_by_loss, lost_nodes
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, first, last, of_kind
from elastic.observe.recovery_line import failure_of, nodes, why_ended
from elastic.report.picture.generations import AT_ONCE, DOWN, Generation, since
from elastic.report.picture.marks import NO_ANSWER, sign_of, text_of
from elastic.report.picture.words import short
from elastic.report.status import Status

MOST_FAULTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """at: seconds since the run began. step: the last one before it. cost_s: None where no
    generation ended by it, and of what ended the run, for that is not over.
    """

    at: float
    step: int | None
    machine: str
    what: str
    cost_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """number: of those that ended a generation. most_expensive: the first of all, with their
    costs; left_out: how many have no room there.
    """

    number: int
    most_expensive: list[Fault]
    left_out: int


def faults_of(events: Events, generations: Sequence[Generation], status: Status) -> Faults:
    """generations: all of them."""
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    if not starts:
        return Faults(number=0, most_expensive=[], left_out=0)
    began, ended = starts[0].time, []
    wrong = {each.event.step: ", ".join(each.event.nodes) for each in of_kind(events, kinds.DivergenceJudged)}
    for (start, after), (before, now) in zip(
        zip_longest(starts, starts[1:]), zip_longest(generations, generations[1:]), strict=True
    ):
        then = own[start.generation]
        found = _all_ended(then, start, status) if now is None else _ended(then, start, after, before, wrong)
        if found is not None:
            event, machine, what = found
            at = before.ends if event is None else since(began, event.time)
            cost_s = None if now is None else _cost_s(before, now)
            ended.append(
                Fault(at=at, step=before.last_step, machine=short(machine), what=short(what), cost_s=cost_s)
            )
    # What ended the run, and is not over yet, comes first.
    ranked = sorted(ended, key=lambda fault: -math.inf if fault.cost_s is None else -fault.cost_s)
    shown = [*ranked, *_survived(events, began)]
    return Faults(
        number=len(ended), most_expensive=shown[:MOST_FAULTS], left_out=max(0, len(shown) - MOST_FAULTS)
    )


# The event that tells of a fault, the machine, and what happened.
_Found = tuple[LoggedEvent[kinds.Event] | None, str, str]


def _ended(
    own: Events, start: Start, after: Start, before: Generation, wrong: Mapping[int, str]
) -> _Found | None:
    """What ended a generation before the next one; None for what is no fault. own: its events.

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


def _all_ended(own: Events, start: Start, status: Status) -> _Found | None:
    """What ended the newest generation. own: its events."""
    if status.state in ("failed", "interrupted"):
        return _down(own, start)
    noticed = ended_by_loss(own)
    if status.state != "running" or noticed is None:
        return None
    return noticed, "", "a node was lost, and the others wait"  # another one may be about to write


def _down(own: Events, start: Start) -> _Found:
    """Why no node was left after a generation."""
    failed, left = last(own, kinds.RunFailed), last(own, kinds.RunInterrupted)
    if failed is not None:
        return failed, failed.node, f"the run failed: {_first_line(failed.event.reason)}"
    if left is None or not left.event.gave_up:
        return None, "", NO_ANSWER
    reason = f"the group gave up: {_first_line(left.event.reason)}"
    if lost := lost_nodes(own, start, None):
        return ended_by_loss(own), ", ".join(lost), f"{nodes(lost)} lost; {reason}"
    return left, left.node, reason


def _cost_s(before: Generation, now: Generation) -> float:
    """From the last step that counts before a fault to the first one after it."""
    lost_s = before.ends - (before.begins if before.trained is None else before.trained)
    if before.gap != AT_ONCE:
        lost_s += now.begins - before.ends
    return max(0.0, lost_s) + (0.0 if now.trains is None else max(0.0, now.trains - now.begins))


def _survived(events: Events, began: float) -> list[Fault]:
    """Saves that failed, and judgements of states; what ended a generation is told elsewhere."""
    return [
        Fault(
            at=since(began, each.time),
            step=getattr(each.event, "step", None),
            machine=short(each.node),
            what=short(_first_line(text)),
            cost_s=None,
        )
        for each in events
        if (text := text_of(each.event)) and sign_of(each.event) in ("save", "state")
        if not isinstance(each.event, kinds.DivergenceDetected | kinds.ShardsMoved)
    ]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
