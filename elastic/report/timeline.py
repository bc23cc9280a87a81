"""Which node was in which generation, and what happened meanwhile: the newest of a long run."""

from collections.abc import Sequence
from typing import Any

from elastic.observe.generations import Generation
from elastic.observe.incidents import Incident
from elastic.report.figures import short

MOST_GENERATIONS = MOST_MARKS = MOST_COMMITS = 500
MOST_NODES = 48
_NO_MARKS = ("generation", "recovery", "checkpoint")  # which are drawn otherwise


def timeline(generations: Sequence[Generation], incidents: Sequence[Incident]) -> dict[str, Any]:
    """generations: of the whole run, at least one.

    In the answer, `began` alone is in seconds since 1970, and other times are seconds after that.
    """
    began = generations[0].begins_s
    shown = generations[-MOST_GENERATIONS:]
    spans = spans_of(shown)
    kept = sorted(spans, key=lambda node: spans[node][-1][1])[-MOST_NODES:]
    lanes = [node for node in spans if node in kept]
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
        "num_nodes": len(spans_of(generations)),
        "generations": [_generation(each, began) for each in shown],
        "lanes": [{"name": short(node), "spans": spans[node]} for node in lanes],
        "marks": [_mark(each, began, generations[-1].until_s, lanes) for each in marks],
        "commits": [since(began, each.time) for each in commits],
        "left_out": {
            "generations": len(generations) - len(shown),
            "nodes": len(spans) - len(lanes),
            "marks": len(told) - len(marks),
            "checkpoints": len(saves) - len(commits),
        },
    }


def spans_of(generations: Sequence[Generation]) -> dict[str, list[list[int]]]:
    """By node, in the order in which they came: [first, last] index of generations in a row."""
    found: dict[str, list[list[int]]] = {}
    for index, generation in enumerate(generations):
        for node in generation.nodes:
            spans = found.setdefault(node, [])
            if spans and spans[-1][1] >= index - 1:
                spans[-1][1] = index
            else:
                spans.append([index, index])
    return found


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


def _mark(each: Incident, began: float, ends_s: float, lanes: Sequence[str]) -> dict[str, Any]:
    """One of a node that is not drawn names it."""
    lane = lanes.index(each.node) if each.node in lanes else None
    text = each.text if lane is not None or not each.node else f"{each.node}: {each.text}"
    return {
        "at": since(began, min(each.time, ends_s)),
        "lane": lane,
        "kind": each.kind,
        "text": short(text),
    }
