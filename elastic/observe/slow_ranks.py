"""A rank that is slower than the others by more than noise is named, with what it costs the group.

One of W equal ranks is the slowest of a step by chance, in one step of W. So a rank is named only
where it is the slowest far more often than that (`_SIGMAS` standard deviations of the binomial
distribution), and where what it costs exceeds what the others cost, which is chance, by a share of
the time that is worth a look.

It does not say why: a machine may be throttled or shared, or the rank may have more to do.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from elastic.events import WorkerStarted
from elastic.observe.logged_event import Events, of_kind
from elastic.observe.step_batch import StepBatch, added_up

FEWEST_STEPS = 30  # fewer tell nothing
SMALLEST_SHARE = 0.03
_SIGMAS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """share: of the time of the steps, what the group waited for this rank, 0 to 1."""

    rank: int
    node: str
    share: float


@dataclass(slots=True)
class Tally:
    """A tally of the steps of one generation, in which ranks have the same nodes."""

    seconds: float = 0.0
    _world_size: int = 0
    _slowest: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _waited_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, steps: StepBatch) -> None:
        """The next steps.

        Those without a slowest rank (of one worker, or the first) count as time.
        """
        self.seconds = added_up(np.nan_to_num(steps.seconds), self.seconds)
        waited_s = np.maximum(steps.slowest_s - steps.others_s, 0.0)
        is_known = ~np.isnan(steps.slowest_rank + waited_s)
        if not is_known.any():
            return
        self._world_size = steps.world_size[np.flatnonzero(is_known)[-1]]
        ranks, waited_s = steps.slowest_rank[is_known], waited_s[is_known]
        for rank in map(int, np.unique(ranks)):
            own_s = waited_s[ranks == rank]
            self._slowest[rank] += len(own_s)
            self._waited_s[rank] = added_up(own_s, self._waited_s[rank])

    def costs_s(self) -> dict[int, float]:
        """Seconds that the group waited for each slow rank, beyond what it waits by chance."""
        size, steps = self._world_size, sum(self._slowest.values())
        if size < 2 or steps < FEWEST_STEPS:
            return {}
        by_chance = steps / size
        limit = by_chance + _SIGMAS * math.sqrt(by_chance * (1 - 1 / size))
        all_s = sum(self._waited_s.values())
        found = {}
        for rank, count in self._slowest.items():
            own_s = self._waited_s[rank]
            cost_s = own_s - (all_s - own_s) / (size - 1)
            if count > limit and cost_s >= SMALLEST_SHARE * self.seconds:
                found[rank] = cost_s
        return found


def slow_ranks(events: Events, tallies: Mapping[int, Tally]) -> list[SlowRank]:
    """The slow ranks of a whole run, the most expensive first. tallies: by generation."""
    nodes = {(each.generation, each.event.rank): each.node for each in of_kind(events, WorkerStarted)}
    costs_s: dict[tuple[int, str], float] = defaultdict(float)
    for generation, tally in tallies.items():
        for rank, cost_s in tally.costs_s().items():
            costs_s[rank, nodes.get((generation, rank), "")] += cost_s
    total_s = sum(tally.seconds for tally in tallies.values())
    found = [
        SlowRank(rank=rank, node=node, share=min(1.0, cost_s / total_s))
        for (rank, node), cost_s in costs_s.items()
        if total_s > 0
    ]
    return sorted(found, key=lambda each: -each.share)
