"""When each generation of a run trained, when and why it ended, and what follows until the next.

A generation has the marks of goodput.py: from its start to its first step that counts, and from its
last one to its end, nothing was trained. It ends with the next start, or, where the command was
given again, with its planned stop or its last sign of life.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elastic import events as kinds
from elastic.observe.generation_end import (
    Start,
    down_since_s,
    last_seen_s,
    last_sign_s,
    planned_stop,
    why_ended,
)
from elastic.observe.logged_event import Events, by_generation, first, of_kind
from elastic.observe.step_columns import GenerationSteps, StepColumns

# What follows a generation until the next one begins: nothing, for that begins at once; a planned
# stop; a time in which no node was there.
AT_ONCE, STOP, DOWN = "", "stop", "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The steps include those that were lost later; None if the generation trained no step.

    why: what ended the one before, in words; the cause where there was none. begins_s, ends_s:
    seconds since 1970. trains_s, trained_s: when its first step that counts began, and its last one
    ended; None where none of its steps counts. gap: what follows `ends_s`.
    """

    generation: int
    world_size: int
    nodes: list[str]
    first_step: int | None
    last_step: int | None
    cause: str
    why: str
    begins_s: float
    trains_s: float | None
    trained_s: float | None
    ends_s: float
    gap: str


def generations(events: Events, trained: StepColumns, now_s: float | None) -> list[Generation]:
    """now_s: where the run goes on, seconds since 1970."""
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    spans = _steps(starts, own, trained)
    found: list[Generation] = []
    for before, start, after in zip([None, *starts], starts, [*starts[1:], None], strict=False):
        counted = trained.counted.get(start.generation)
        ends_s, gap = _end(own, start, after, trained.counted)
        first_step, last_step = spans[start.generation]
        found.append(
            Generation(
                generation=start.generation,
                world_size=start.event.world_size,
                nodes=start.event.nodes,
                first_step=first_step,
                last_step=last_step,
                cause=start.event.cause,
                why=start.event.cause if before is None else why_ended(own[before.generation], before, start),
                begins_s=start.time,
                trains_s=None if counted is None else counted.begin,
                trained_s=None if counted is None else counted.end,
                ends_s=max(ends_s, now_s or ends_s) if after is None else ends_s,
                gap=gap,
            )
        )
    return found


def _end(
    own: Mapping[int, Events], start: Start, after: Start | None, steps: Mapping[int, GenerationSteps]
) -> tuple[float, str]:
    """(seconds since 1970, what follows). own: events by generation."""
    seen_s = {start.generation: last_seen_s(own[start.generation])}
    last_s = last_sign_s(start, steps.get(start.generation), seen_s)
    if after is None:
        return last_s, AT_ONCE
    between = [*own[start.generation], *own[after.generation]]
    stop = planned_stop(between, start, after)
    if stop is not None:
        return min(stop.time, after.time), STOP
    since_s = down_since_s(start, after, between, last_s)
    return (after.time, AT_ONCE) if since_s is None else (since_s, DOWN)


def _steps(
    starts: list[Start], own: Mapping[int, Events], trained: StepColumns
) -> dict[int, tuple[int | None, int | None]]:
    """By generation, its first and its last step.

    Its last step may have been lost since. A step that is no line of the metrics yet as rank 0 dies
    does not count, although other workers have finished it: `generation_ended` tells of it too, and
    is asked only while nothing was restored.
    """
    found: dict[int, tuple[int | None, int | None]] = {}
    reached: int | None = None  # the newest step that counted when the next state was restored
    for start in reversed(starts):
        then = own[start.generation]
        restored = first(then, kinds.Restored)
        ended = [each.event.step for each in of_kind(then, kinds.GenerationEnded)]
        last_step = max(
            [trained.last_of.get(start.generation, 0), *(ended if reached is None else [reached])]
        )
        is_trained = restored is not None and last_step > restored.event.step
        found[start.generation] = (
            (restored.event.step + 1, last_step) if restored is not None and is_trained else (None, None)
        )
        if restores := of_kind(then, kinds.Restored):
            reached = max(each.event.step + each.event.lost_steps for each in restores)
    return found
