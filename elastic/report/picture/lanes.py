"""Which machine was in which generation; of many machines, those with faults are shown first.

A machine is told by the host in its nodes' names. It does not promise more than that: two hosts of
one name are one machine.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastic.observe.generation_end import Start
from elastic.report.picture.marks import Mark
from elastic.report.picture.words import short

# As system/addresses.py names a node: host, process, and a random part.
_NODE = re.compile(r"(.+)-[0-9]+-[0-9a-f]{8}", re.ASCII | re.DOTALL)
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One machine, whose agents may have come one after another.

    nodes: how many there were. spans: (first, last) index of the generations that it was in.
    """

    name: str
    nodes: int
    spans: list[Span]


def lanes_of(starts: Sequence[Start]) -> tuple[list[Lane], dict[str, int]]:
    """The lanes in the order in which their nodes came, and the index of the lane of each node.

    A node goes on in the lane of one of the same host that had left before it came.
    """
    spans: dict[str, list[Span]] = {}
    for index, start in enumerate(starts):
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


def chosen(lanes: Sequence[Lane], marks: Iterable[Mark], most: int) -> list[int]:
    """Which lanes are shown: those with the most faults, then marks, then generations."""
    faults, others = Counter[int](), Counter[int]()
    for mark in marks:
        if mark.lane is not None:
            (faults if mark.kind == "fault" else others)[mark.lane] += 1
    ranked = sorted(range(len(lanes)), key=lambda at: (-faults[at], -others[at], -_length(lanes[at])))
    return sorted(ranked[:most])


def among(lane: Lane, first: int, left_out: int) -> Lane:
    """The lane where `left_out` generations from the index `first` on are not drawn."""
    if not left_out:
        return lane
    last = first + left_out
    before = [(begin, min(end, first - 1)) for begin, end in lane.spans if begin < first]
    after = [(max(begin, last) - left_out, end - left_out) for begin, end in lane.spans if end >= last]
    return replace(lane, spans=[*before, *after])


def _host(node: str) -> str:
    named = _NODE.fullmatch(node)
    return node if named is None else named[1]


def _length(lane: Lane) -> int:
    """In how many generations it was."""
    return sum(last - first + 1 for first, last in lane.spans)
