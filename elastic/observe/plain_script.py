"""A script without this library is known by its restarts, its exit and its time, and by no step."""

from collections import Counter
from dataclasses import dataclass

from elastic import events as kinds
from elastic.observe.generation_end import last_seen_s
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, last, of_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainScript:
    """restarts: how often it was started again, by cause. last_exit: in words; empty before the
    first. running_s: seconds in which its workers ran.
    """

    restarts: dict[str, int]
    last_exit: str
    running_s: float


def plain_script(events: Events, now_s: float | None = None) -> PlainScript | None:
    """None for a recipe, and before the first generation. now_s: where it runs, since 1970."""
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    if not starts or not starts[-1].event.plain:
        return None
    newest = starts[-1].generation
    until_s = {each.generation: last_seen_s(own[each.generation]) for each in starts}
    if now_s is not None and last(own[newest], kinds.GenerationEnded) is None:
        until_s[newest] = now_s
    return PlainScript(
        restarts=dict(Counter(each.event.cause for each in starts[1:])),
        last_exit="exit code 0" if end_of_run(events) else _last_exit(events),
        running_s=sum(max(0.0, until_s[each.generation] - each.time) for each in starts),
    )


def _last_exit(events: Events) -> str:
    for each in events[::-1]:
        match each.event:
            case kinds.RunFailed(exit_code=code, reason=reason):
                return f"exit code {code}: {reason}"
            case kinds.GenerationEnded(cause=cause):
                return cause
            case _:
                pass
    return ""


def end_of_run(events: Events) -> LoggedEvent[kinds.RunFinished] | None:
    """The end of the run; of a plain script, that of its newest start: other arguments go on."""
    found, start = last(events, kinds.RunFinished), last(events, kinds.GenerationStarted)
    is_over = found and start and start.event.plain and found.generation < start.generation
    return None if is_over else found
