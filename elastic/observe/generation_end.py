"""How and why a generation ended, and when the last of its nodes was gone.

It does not promise to know why: where no event tells, it says the cause of the next generation.
"""

from collections.abc import Collection, Mapping

from elastic import events as kinds
from elastic.observe.logged_event import Events, LoggedEvent, in_generation, of_kind
from elastic.observe.step_columns import GenerationSteps

_LONGEST_MESSAGE = 100
REHEARSAL = "rehearsal"  # the cause of a generation that began for a comparison alone
NODE_LOST = "node lost"  # the cause of a generation, and the end of the sentence about the one before

Start = LoggedEvent[kinds.GenerationStarted]


def planned_stop(events: Events, before: Start, after: Start) -> LoggedEvent[kinds.RunInterrupted] | None:
    """The planned stop of the whole run between two generations, if there was one.

    Every node of the generation was told to leave, and left. A node that leaves while others train
    on writes the same event; where those crash before they have formed a generation without it, it
    was a crash.
    """
    if after.event.cause != "resume":
        return None
    return left_as_planned(in_generation(events, before.generation), before)


def left_as_planned(own: Events, before: Start) -> LoggedEvent[kinds.RunInterrupted] | None:
    """The last event of the last node of a generation, if all were told to leave.

    own: its events.
    """
    left = of_kind(own, kinds.RunInterrupted)
    planned = {each.node for each in left if not each.event.gave_up}
    return left[-1] if left and planned.issuperset(before.event.nodes) else None


def ended_by_loss(own: Events) -> LoggedEvent[kinds.GenerationEnded] | None:
    """Where the other nodes noticed that one was lost. own: events of one generation."""
    return next(
        (each for each in of_kind(own, kinds.GenerationEnded) if each.event.cause.endswith(NODE_LOST)), None
    )


def lost_nodes(own: Events, start: Start, after: Start | None) -> list[str]:
    """The nodes that a generation has lost, before the next one or the run's end.

    own: its events. Where the others gave up, no generation without them tells which they were: all
    that said nothing of its end.
    """
    if after is not None and after.event.cause == NODE_LOST:
        return [node for node in start.event.nodes if node not in after.event.nodes]
    if ended_by_loss(own) is None or (after is not None and after.event.cause != "resume"):
        return []
    told = {each.node for each in own if isinstance(each.event, kinds.GenerationEnded | kinds.RunInterrupted)}
    return [node for node in start.event.nodes if node not in told]


def last_seen_s(own: Events) -> float:
    """own: events of one generation."""
    return max(each.time for each in own)


def last_sign_s(start: Start, own: GenerationSteps | None, seen_s: Mapping[int, float]) -> float:
    """When something of the generation was seen last: an event, or a step that counts."""
    seen = seen_s.get(start.generation, start.time)
    return max(seen, start.time if own is None else own.end)


def lost_steps_s(after: Events) -> list[float]:
    """When the last step ended before all nodes were gone, whose line is gone where it was lost.

    after: events of the generation that resumed.
    """
    ended_s = [each.event.last_step_s for each in of_kind(after, kinds.Restored)]
    return [each for each in ended_s if each is not None]


def down_since_s(before: Start, after: Start, events: Events, last_s: float) -> float | None:
    """When no node was left between two generations; None where some were, or by a planned stop.

    The time from then to the start of `after` is that in which the run was down: how long depends
    on when the command was given again. events: those of both generations at least. last_s: the
    `last_sign_s` of `before`.
    """
    if after.event.cause != "resume" or planned_stop(events, before, after) is not None:
        return None
    lost_s = lost_steps_s(in_generation(events, after.generation))
    return min(max([last_s, *lost_s]), after.time)


def why_ended(events: Events, before: Start, after: Start) -> str:
    """What ended the generation before. events: at least those of that generation."""
    then, now = set(before.event.nodes), set(after.event.nodes)
    match after.event.cause:
        case "failure":
            found = failure_of(in_generation(events, before.generation))
            return "failure" if found is None else found[1]
        case "node lost" if then - now:
            return f"{nodes(then - now)} lost"
        case "node left" if then - now:
            return f"{nodes(then - now)} left"
        case "node joined" if now - then:
            return f"{nodes(now - then)} joined"
        case cause:
            return str(cause)


def nodes(ids: Collection[str]) -> str:
    names = ", ".join(sorted(ids))
    return f"node {names}" if len(ids) == 1 else f"nodes {names}"


def failure_of(own: Events) -> tuple[LoggedEvent[kinds.Event], str] | None:
    """The first worker that failed by itself: the event, and in words.

    own: events of one generation. A hang and an exception say more than the exit.
    """
    messages = {each.event.rank: each.event.message for each in of_kind(own, kinds.WorkerFailed)}
    said = ((each, _failed(each.event, messages)) for each in own)
    return next(((each, words) for each, words in said if words), None)


def _failed(event: kinds.Event, messages: Mapping[int, str]) -> str:
    """Empty unless it is a failure. messages: of the exceptions, by rank."""
    if isinstance(event, kinds.HangDetected):
        return f"rank {event.rank} hung"
    if isinstance(event, kinds.WorkerFailed):
        return f"rank {event.rank} failed ({_short(event.message)})"
    if isinstance(event, kinds.WorkerExited) and not event.victim and event.signal is not None:
        return f"rank {event.rank} was killed by {event.signal}"
    if isinstance(event, kinds.WorkerExited) and not event.victim and event.code:
        said = messages.get(event.rank, f"exit code {event.code}")
        return f"rank {event.rank} failed ({_short(said)})"
    return ""


def _short(message: str) -> str:
    first = message.strip().partition("\n")[0]
    return first if len(first) <= _LONGEST_MESSAGE else f"{first[:_LONGEST_MESSAGE]}..."
