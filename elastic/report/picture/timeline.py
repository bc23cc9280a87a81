"""Who was in which generation, when it trained, and what happened meanwhile, bounded in size.

A generation has the marks of goodput.py: from its start to its first step that counts, and from its
last one to the next start, nothing was trained. It does not promise precision across nodes: each
event carries the clock of the node that wrote it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from elastic import events as kinds
from elastic.observe.logged_event import Events, by_generation, of_kind
from elastic.observe.recovery import Recovery, Start, planned_stop
from elastic.observe.step_columns import GenerationSteps, StepColumns
from elastic.report.picture.marks import Mark, both_ends, marks_of
from elastic.report.picture.words import short
from elastic.report.report import GenerationSummary, Report

MOST_GENERATIONS = 600
MOST_LANES = 48
MOST_MARKS = 600
# As system/addresses.py names a node: host, process, and a random part.
_NODE = re.compile(r"(.+)-[0-9]+-[0-9a-f]{8}", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Times are seconds since the run began.

    trains, trained: when its first step that counts began, and its last one ended; None where none
    of its steps counts. ends: the next start, or the end of what is known; of a generation that
    ended in a planned stop, that stop. recovery: how it came after the one before.
    """

    number: int
    cause: str
    world_size: int
    num_nodes: int
    begins: float
    trains: float | None
    trained: float | None
    ends: float
    first_step: int | None
    last_step: int | None
    recovery: Recovery | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One machine, whose agents may have come one after another.

    nodes: how many there were. spans: (first, last) index of the generations that it was in.
    """

    name: str
    nodes: int
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """began: seconds since 1970. ends: seconds after that.

    lanes_left_out, generations_left_out, marks_left_out: how many have no room. Of generations and
    marks these are the ones in the middle, of lanes those that were in for the fewest.
    """

    began: float
    ends: float
    generations: list[Generation]
    generations_left_out: int
    lanes: list[Lane]
    lanes_left_out: int
    marks: list[Mark]
    marks_left_out: int


def timeline(events: Events, trained: StepColumns, report: Report) -> Timeline | None:
    """None before the first generation."""
    starts = of_kind(events, kinds.GenerationStarted)
    if not starts:
        return None
    began = starts[0].time
    last_s = began if trained.last_time_s is None else trained.last_time_s
    ends = max(last_s, *(each.time for each in events))
    generations = _generations(events, trained, report, ends)
    shown, generations_left_out = both_ends(generations, MOST_GENERATIONS)
    index_of = {each.number: index for index, each in enumerate(shown)}
    lanes, lane_of = _lanes([start for start in starts if start.generation in index_of], index_of)
    kept = sorted(sorted(range(len(lanes)), key=lambda at: -_length(lanes[at]))[:MOST_LANES])
    place_of = {node: kept.index(at) for node, at in lane_of.items() if at in kept}
    marks, marks_left_out = both_ends(marks_of(events, began, place_of), MOST_MARKS)
    return Timeline(
        began=began,
        ends=max(0.0, ends - began),
        generations=shown,
        generations_left_out=generations_left_out,
        lanes=[lanes[at] for at in kept],
        lanes_left_out=len(lanes) - len(kept),
        marks=marks,
        marks_left_out=marks_left_out,
    )


def _generations(events: Events, trained: StepColumns, report: Report, ends: float) -> list[Generation]:
    starts = of_kind(events, kinds.GenerationStarted)
    steps, own = trained.counted, by_generation(events)
    recoveries = iter(report.recoveries)
    return [
        _generation(
            start,
            ends if after is None else _end(own[start.generation], start, after),
            steps.get(start.generation),
            (starts[0].time, summary),
            # There is one for each generation that is not the start of the run.
            None if start.event.cause == "start" else next(recoveries, None),
        )
        for start, after, summary in zip_longest(starts, starts[1:], report.generations)
    ]


def _end(own: Events, start: Start, after: Start) -> float:
    """own: events of the generation of `start`."""
    stop = planned_stop(own, start, after)
    return after.time if stop is None else min(stop.time, after.time)


def _generation(
    start: Start,
    ends: float,
    own: GenerationSteps | None,
    of_run: tuple[float, GenerationSummary],
    recovery: Recovery | None,
) -> Generation:
    """of_run: when it began, and what the report says of this generation."""
    began, summary = of_run
    return Generation(
        number=start.generation,
        cause=short(start.event.cause),
        world_size=start.event.world_size,
        num_nodes=len(start.event.nodes),
        begins=_since(began, start.time),
        trains=None if own is None else _since(began, own.begin),
        trained=None if own is None else _since(began, own.end),
        ends=_since(began, ends),
        first_step=summary.first_step,
        last_step=summary.last_step,
        recovery=None if recovery is None else _shortened(recovery),
    )


def _shortened(recovery: Recovery) -> Recovery:
    source = None if recovery.source is None else short(recovery.source)
    return replace(recovery, cause=short(recovery.cause), source=source)


def _since(began: float, time: float) -> float:
    # A millisecond is less than a pixel at any zoom, and a clock of another node may be behind.
    return max(0.0, round(time - began, 3))


def _lanes(starts: Sequence[Start], index_of: Mapping[int, int]) -> tuple[list[Lane], dict[str, int]]:
    """The lanes in the order in which their nodes came, and the index of the lane of each node.

    A node goes on in the lane of one of the same host that had left before it came.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for start in starts:
        index = index_of[start.generation]
        for node in dict.fromkeys(start.event.nodes):
            own = spans.setdefault(node, [])
            if own and own[-1][1] == index - 1:
                own[-1] = own[-1][0], index
            else:
                own.append((index, index))
    lanes: list[Lane] = []
    of_host: dict[str, list[int]] = {}
    lane_of: dict[str, int] = {}
    for node, own in spans.items():
        places = of_host.setdefault(_host(node), [])
        free = next((at for at in places if lanes[at].spans[-1][1] < own[0][0]), None)
        if free is None:
            free = len(lanes)
            places.append(free)
            lanes.append(Lane(name=short(node), nodes=1, spans=own))
        else:
            before = lanes[free]
            lanes[free] = Lane(name=short(_host(node)), nodes=before.nodes + 1, spans=[*before.spans, *own])
        lane_of[node] = free
    return lanes, lane_of


def _host(node: str) -> str:
    named = _NODE.fullmatch(node)
    return node if named is None else named[1]


def _length(lane: Lane) -> int:
    """In how many generations it was."""
    return sum(last - first + 1 for first, last in lane.spans)
