"""When each generation of a run trained, when it ended, and what follows until the next one.

A generation has the marks of goodput.py: from its start to its first step that counts, and from its
last one to its end, nothing was trained. It ends with the next start, or, where the command was
given again, with its planned stop or its last sign of life.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from elastic import events as kinds
from elastic.observe.generation_end import Start, down_since_s, last_seen_s, last_sign_s, planned_stop
from elastic.observe.logged_event import Events, by_generation, of_kind
from elastic.observe.step_columns import GenerationSteps, StepColumns
from elastic.report.picture.words import short
from elastic.report.report import GenerationSummary, Report

# What follows a generation until the next one begins: nothing, for that begins at once; a planned
# stop; a time in which no group was there; generations that are not drawn.
AT_ONCE, STOP, DOWN, LEFT_OUT = "", "stop", "down", "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Times are seconds since the run began.

    trains, trained: when its first step that counts began, and its last one ended; None where none
    of its steps counts. gap: what follows `ends`.
    """

    number: int
    cause: str
    world_size: int
    num_nodes: int
    begins: float
    trains: float | None
    trained: float | None
    ends: float
    gap: str
    first_step: int | None
    last_step: int | None


def generations_of(events: Events, trained: StepColumns, report: Report, ends_s: float) -> list[Generation]:
    """All of them. ends_s: the end of what is known, seconds since 1970."""
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    steps = trained.counted
    return [
        _generation(
            start,
            (ends_s, AT_ONCE) if after is None else _end(own, start, after, steps),
            steps.get(start.generation),
            (starts[0].time, summary),
        )
        for start, after, summary in zip_longest(starts, starts[1:], report.generations)
    ]


def _end(
    own: Mapping[int, Events], start: Start, after: Start, steps: Mapping[int, GenerationSteps]
) -> tuple[float, str]:
    """own: events by generation."""
    between = [*own[start.generation], *own[after.generation]]
    stop = planned_stop(between, start, after)
    if stop is not None:
        return min(stop.time, after.time), STOP
    seen_s = {start.generation: last_seen_s(own[start.generation])}
    last_s = last_sign_s(start, steps.get(start.generation), seen_s)
    since_s = down_since_s(start, after, between, last_s)
    return (after.time, AT_ONCE) if since_s is None else (since_s, DOWN)


def _generation(
    start: Start,
    end: tuple[float, str],
    own: GenerationSteps | None,
    of_run: tuple[float, GenerationSummary],
) -> Generation:
    """end: when, and what follows. of_run: when it began, and what the report says of this one."""
    (began, summary), (ends_s, gap) = of_run, end
    return Generation(
        number=start.generation,
        cause=short(start.event.cause),
        world_size=start.event.world_size,
        num_nodes=len(start.event.nodes),
        begins=since(began, start.time),
        trains=None if own is None else since(began, own.begin),
        trained=None if own is None else since(began, own.end),
        ends=since(began, ends_s),
        gap=gap,
        first_step=summary.first_step,
        last_step=summary.last_step,
    )


def since(began: float, time: float) -> float:
    # A millisecond is less than a pixel at any zoom, and another node's clock a little behind.
    return max(0.0, round(time - began, 3))
