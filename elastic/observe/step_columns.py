"""What is computed with of each step, as columns: a run may have millions of steps.

A rank that is slower than the others by more than noise is named, with what it costs the group. One
of W equal ranks is the slowest of a step by chance, in one step of W. So a rank is named only where
it is the slowest far more often than that (`_SIGMAS` standard deviations of the binomial
distribution), and where what it costs exceeds what the others cost, which is chance, by a share of
the time that is worth a look. It does not say why: a machine may be throttled or shared, or the
rank may have more to do.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.events import WorkerStarted
from elastic.observe.logged_event import Events, of_kind
from elastic.observe.step_line import StepLine, number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# The fields are those of StepLine, in the order of the lines. NaN stands for None, and for a loss
# that is no number. audited: 1 where it was.
StepColumns = np.recarray[Any, Any]
_KINDS = dict.fromkeys(("step", "generation", "world_size"), np.int64) | dict.fromkeys(
    ("loss", "time", "seconds", "audited", "slowest_rank", "slowest_s", "others_s"), np.float64
)
FEWEST_STEPS = 30  # fewer tell nothing
SMALLEST_SHARE = 0.03
_SIGMAS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Neighbouring lines as they were read; they have `values` where the reader was asked for them.

    num_unreadable: lines among these that are none of a step, as after damage on the disk.
    """

    lines: Sequence[StepLine]
    num_unreadable: int = 0


def columns_of(lines: Iterable[StepLine]) -> StepColumns:
    rows = [
        tuple(number(line.loss) if name == "loss" else getattr(line, name) for name in _KINDS)
        for line in lines
    ]
    return np.array(rows, [*_KINDS.items()]).view(np.recarray)


def joined(parts: Sequence[StepColumns]) -> StepColumns:
    """parts: at least one."""
    return np.concatenate(parts).view(np.recarray)


def by_generation(steps: StepColumns) -> dict[int, StepColumns]:
    """Those of each generation, in their order."""
    order = np.argsort(steps.generation, kind="stable")
    numbers, begins = np.unique(steps.generation[order], return_index=True)
    return dict(zip(numbers.tolist(), np.split(steps[order], begins[1:]), strict=False))


NO_STEPS = columns_of([])


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """share: of the time of the steps, what the group waited for this rank, 0 to 1."""

    rank: int
    node: str
    share: float


def slow_ranks(events: Events, steps: StepColumns) -> list[SlowRank]:
    """The slow ranks of these steps, the most expensive first."""
    nodes = {(each.generation, each.event.rank): each.node for each in of_kind(events, WorkerStarted)}
    lost_s: dict[tuple[int, str], float] = defaultdict(float)
    for generation, own in by_generation(steps).items():
        for rank, cost_s in costs_s(own).items():
            lost_s[rank, nodes.get((generation, rank), "")] += cost_s
    total_s = float(np.nansum(steps.seconds))
    found = [
        SlowRank(rank=rank, node=node, share=min(1.0, cost_s / total_s))
        for (rank, node), cost_s in lost_s.items()
        if total_s > 0
    ]
    return sorted(found, key=lambda each: -each.share)


def costs_s(own: StepColumns) -> dict[int, float]:
    """Seconds that the group waited for each slow rank, beyond what it waits by chance.

    own: of one generation, in which ranks have the same nodes. A step without a slowest rank (of
    one worker, or the first) counts as time.
    """
    waited_s = np.maximum(own.slowest_s - own.others_s, 0.0)
    is_known = ~np.isnan(own.slowest_rank + waited_s)
    ranks, waited_s = own.slowest_rank[is_known], waited_s[is_known]
    size = int(own.world_size[is_known][-1]) if len(ranks) else 0
    if len(ranks) < FEWEST_STEPS:
        return {}
    by_chance = len(ranks) / size
    limit = by_chance + _SIGMAS * math.sqrt(by_chance * (1 - 1 / size))
    all_s, least_s = float(waited_s.sum()), SMALLEST_SHARE * float(np.nansum(own.seconds))
    found = {}
    for rank in np.unique(ranks):
        own_s = float(waited_s[ranks == rank].sum())
        cost_s = own_s - (all_s - own_s) / (size - 1)
        if (ranks == rank).sum() > limit and cost_s >= least_s:
            found[int(rank)] = cost_s
    return found


def known(values: Floats) -> Floats:
    """Without NaN."""
    return values[~np.isnan(values)]
