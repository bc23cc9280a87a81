"""What a recovery cost, in one line for the console: where the run is back, how soon, and why.

It does not promise to know why: where no event tells, it says the cause of the generation.
"""

from collections.abc import Collection, Mapping

from elastic import events as kinds
from elastic.observe.generation_end import Start, last_seen_s
from elastic.observe.logged_event import Events, LoggedEvent, first, in_generation, of_kind
from elastic.observe.recovery import recovery_of
from elastic.observe.step_columns import StepColumns

_LONGEST_MESSAGE = 100


def recovery_line(events: Events, trained: StepColumns, generation: int) -> str | None:
    """Of the recovery that ended with the first new step of this generation, None if none did.

    trained: the last steps before the fault are enough.
    """
    starts = of_kind(events, kinds.GenerationStarted)
    place = next((at for at, each in enumerate(starts) if each.generation == generation), None)
    first_step = first(in_generation(events, generation), kinds.FirstStep)
    if place is None or first_step is None or starts[place].event.cause == "start":
        return None
    before = starts[place - 1] if place else None
    seen_s = {} if before is None else _seen_s(events, before)
    recovery = recovery_of(events, trained, before, starts[place], seen_s)
    if recovery.total_s is None:
        return None
    step = first_step.event.step
    why = recovery.cause if before is None else why_ended(events, before, starts[place])
    lost = f"{recovery.lost_steps} step{'' if recovery.lost_steps == 1 else 's'} lost"
    down = f" ({recovery.down_s:.2f} s of it without a node)" if recovery.down_s else ""
    return f"back at step {step} after {recovery.total_s:.2f} s{down}: {why}, {lost}"


def _seen_s(events: Events, before: Start) -> dict[int, float]:
    return {before.generation: last_seen_s(in_generation(events, before.generation))}


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
    """Empty for what is no failure. messages: of the exceptions, by rank."""
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
