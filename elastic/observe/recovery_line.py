"""What a recovery cost, in one line for the console: where the run is back, how soon, and why.

It does not promise to know why: where no event tells, it says the cause of the generation.
"""

from collections.abc import Collection, Mapping, Sequence

from elastic import events as kinds
from elastic.observe.generation_end import REHEARSAL, Start, last_seen_s
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, first, in_generation, of_kind
from elastic.observe.recovery import Recovery, recovery_of, since_new_step
from elastic.observe.step_columns import StepColumns

_LONGEST_MESSAGE = 100


def recovery_line(events: Events, trained: StepColumns, generation: int) -> str | None:
    """Of the recovery that ended with the first new step of this generation, None if none did.

    Where a fault met a generation that had brought no new step yet, it is one recovery in several
    tries, since the first of the faults. trained: the last steps before the fault are enough.
    """
    own = by_generation(events)
    starts = [each for each in of_kind(events, kinds.GenerationStarted) if each.generation <= generation]
    first_step = first(own[generation], kinds.FirstStep)
    if first_step is None or not starts or starts[-1].generation != generation:
        return None
    tries = since_new_step(own, starts)
    seen_s = {each.generation: last_seen_s(own[each.generation]) for each in tries}
    # A lone generation came after others that this node has not seen.
    lengths = range(2, len(tries) + 1) if len(tries) > 1 else [1]
    found = [recovery_of(own, trained, tries[:length], seen_s) for length in lengths]
    if starts[-1].event.cause in ("start", REHEARSAL) or found[-1].total_s is None:
        return None
    why = found[0].cause if len(tries) == 1 else why_ended(events, *tries[:2])
    return f"back at step {first_step.event.step} after {_cost(found)}: {why}, {_lost(found)}"


def _cost(tries: Sequence[Recovery]) -> str:
    """Of all tries, of which the last one brought a new step."""
    down_s = sum(each.down_s or 0.0 for each in tries)
    down = f" (for {down_s:.2f} s of it no node answered)" if down_s else ""
    number = f" in {len(tries)} tries" if len(tries) > 1 else ""
    return f"{tries[-1].total_s:.2f} s{down}{number}"


def _lost(tries: Sequence[Recovery]) -> str:
    lost_steps = sum(each.lost_steps for each in tries)
    return f"{lost_steps} step{'' if lost_steps == 1 else 's'} lost"


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
