"""Which machine was in which generation, and what happened meanwhile: the newest of a long run.

A machine is told by the host in its nodes' names. It does not promise more than that: two hosts of
one name whose nodes were never there at once are one machine.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.observe.generations import Generation
from elastic.observe.incidents import Incident
from elastic.report.words import short

MOST_GENERATIONS = MOST_MARKS = MOST_COMMITS = 500
MOST_LANES = 48
_NO_MARKS = ("generation", "recovery", "checkpoint")  # which are drawn otherwise
# As system/addresses.py names a node: host, process, and a random part.
_NODE = re.compile(r"(.+)-[0-9]+-[0-9a-f]{8}", re.ASCII | re.DOTALL)


@dataclass(slots=True)
class Lane:
    """One machine, whose agents may have come one after another.

    spans: [first, last] index of the generations that it was in, ascending.
    """

    host: str
    nodes: list[str] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)


def timeline(generations: Sequence[Generation], incidents: Sequence[Incident]) -> dict[str, Any]:
    """generations: of the whole run, at least one.

    In the answer, `began` alone is in seconds since 1970, and other times are seconds after that.
    """
    began = generations[0].begins_s
    shown = generations[-MOST_GENERATIONS:]
    lanes = lanes_of(shown)
    kept = sorted(lanes, key=lambda lane: lane.spans[-1][1])[-MOST_LANES:]
    drawn = [lane for lane in lanes if lane in kept]
    lane_of = {node: at for at, lane in enumerate(drawn) for node in lane.nodes}
    saves = [each for each in incidents if each.kind == "checkpoint"]
    told = [each for each in incidents if each.kind not in _NO_MARKS]
    marks, commits = (
        [each for each in found[-most:] if each.time >= shown[0].begins_s]
        for found, most in ((told, MOST_MARKS), (saves, MOST_COMMITS))
    )
    return {
        "began": began,
        "ends": since(began, generations[-1].until_s),
        "num_generations": len(generations),
        "num_machines": len(lanes_of(generations)),
        "generations": [_generation(each, began) for each in shown],
        "lanes": [
            {
                "name": short(lane.nodes[0] if len(lane.nodes) == 1 else lane.host),
                "nodes": len(lane.nodes),
                "spans": lane.spans,
            }
            for lane in drawn
        ],
        "marks": [_mark(each, began, generations[-1].until_s, lane_of) for each in marks],
        "commits": [since(began, each.time) for each in commits],
        "left_out": {
            "generations": len(generations) - len(shown),
            "machines": len(lanes) - len(drawn),
            "marks": len(told) - len(marks),
            "checkpoints": len(saves) - len(commits),
        },
    }


def lanes_of(generations: Sequence[Generation]) -> list[Lane]:
    """In the order in which their nodes came. A node goes on in the lane of one of the same host
    that had left before it came.
    """
    last_of: dict[str, int] = {}
    for index, generation in enumerate(generations):
        last_of.update(dict.fromkeys(generation.nodes, index))
    lanes: list[Lane] = []
    of_host: dict[str, list[Lane]] = {}
    lane_of: dict[str, Lane] = {}
    for index, generation in enumerate(generations):
        for node in generation.nodes:
            if node not in lane_of:
                named = _NODE.fullmatch(node)
                places = of_host.setdefault(node if named is None else named[1], [])
                free = (lane for lane in places if all(last_of[each] < index for each in lane.nodes))
                if (lane := next(free, None)) is None:
                    lane = Lane(host=node if named is None else named[1])
                    lanes.append(lane)
                    places.append(lane)
                lane.nodes.append(node)
                lane_of[node] = lane
            spans = lane_of[node].spans
            if spans and spans[-1][1] >= index - 1:
                spans[-1][1] = index
            else:
                spans.append([index, index])
    return lanes


def since(began: float, time: float) -> float:
    # A millisecond is less than a pixel at any zoom, and another node's clock a little behind.
    return max(0.0, round(time - began, 3))


def _generation(each: Generation, began: float) -> dict[str, Any]:
    return {
        "number": each.generation,
        "cause": short(each.cause),
        "world_size": each.world_size,
        "num_nodes": len(each.nodes),
        "begins": since(began, each.begins_s),
        "trains": None if each.trains_s is None else since(began, each.trains_s),
        "trained": None if each.trained_s is None else since(began, each.trained_s),
        "ends": since(began, each.ends_s),
        "gap": each.gap if each.after else "",
        "first_step": each.first_step,
        "last_step": each.last_step,
    }


def _mark(each: Incident, began: float, ends_s: float, lane_of: dict[str, int]) -> dict[str, Any]:
    """One of a machine that is not drawn names it."""
    lane = lane_of.get(each.node)
    text = each.text if lane is not None or not each.node else f"{each.node}: {each.text}"
    return {
        "at": since(began, min(each.time, ends_s)),
        "lane": lane,
        "kind": each.kind,
        "text": short(text),
    }
