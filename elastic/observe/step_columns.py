"""What a report computes with of each step, in a hundredth of the memory that the lines would take.

A run may have millions of steps. Neighbouring lines are an array for each field, so that a million
are added up at once; numbers are added up one by one, in the order of the steps: no figure depends
on how many lines come at once.

A rank that is slower than the others by more than noise is named, with what it costs the group. One
of W equal ranks is the slowest of a step by chance, in one step of W. So a rank is named only where
it is the slowest far more often than that (`_SIGMAS` standard deviations of the binomial
distribution), and where what it costs exceeds what the others cost, which is chance, by a share of
the time that is worth a look. It does not say why: a machine may be throttled or shared, or the
rank may have more to do.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.events import WorkerStarted
from elastic.observe.logged_event import Events, of_kind
from elastic.observe.step_line import NAMES, OwnFields, StepLine

ABSENT = object()  # the value of a name that a line does not have
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_ARRAYS = {"step": np.int64, "generation": np.int64} | dict.fromkeys(
    ("time", "seconds", "slowest_rank", "slowest_s", "others_s"), np.float64
)
DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
FEWEST_STEPS = 30  # fewer tell nothing
SMALLEST_SHARE = 0.03
_SIGMAS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The fields are those of StepLine, each of shape (lines,), which may be (0,).

    NaN stands for None, also in slowest_rank. values: by name, what the recipe logged in each step,
    or ABSENT; empty where the reader was not asked for values. num_unreadable: lines among these
    that are none of a step, as after damage on the disk; what they said is not known.
    """

    step: Ints
    epoch: list[int]
    loss: list[Any]
    chain: list[Any]
    world_size: list[int]
    generation: Ints
    time: Floats
    seconds: Floats
    audited: list[bool | None]
    slowest_rank: Floats
    slowest_s: Floats
    others_s: Floats
    values: Mapping[str, list[Any]] = field(default_factory=dict)
    num_unreadable: int = 0

    def __len__(self) -> int:
        return len(self.step)

    def by_generation(self) -> Iterator[tuple[int, "StepBatch"]]:
        """Those of each generation, in their order; without values."""
        changes = np.flatnonzero(np.diff(self.generation)) + 1
        places = [0, *changes.tolist(), len(self)] if len(self) else []
        for begin, end in pairwise(places):
            part = {name: getattr(self, name)[begin:end] for name in NAMES}
            yield int(self.generation[begin]), StepBatch(**part)


def batch_of(lines: Sequence[OwnFields | StepLine], values: Sequence[Mapping[str, Any]] = ()) -> StepBatch:
    """values: of each line, what the recipe logged, or all its fields; empty for none."""
    columns: dict[str, Any] = {name: [*map(attrgetter(name), lines)] for name in NAMES}
    arrays = {name: np.array(columns[name], kind) for name, kind in _ARRAYS.items()}
    names = dict.fromkeys(name for each in values for name in each if name not in columns)
    logged = {name: [each.get(name, ABSENT) for each in values] for name in names}
    return StepBatch(**(columns | arrays), values=logged)


def with_values(lines: Sequence[StepLine]) -> StepBatch:
    return batch_of(lines, [line.values for line in lines])


def _doubles() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Tally:
    """The steps of one generation that count, in which ranks have the same nodes.

    last_step: of the last line. seconds: those in its steps. begins_s: when its first step began.
    times_s: when its steps ended, as far as their lines say it.
    """

    last_step: int = 0
    seconds: float = 0.0
    begins_s: float | None = None
    times_s: "array[float]" = field(default_factory=_doubles)
    _world_size: int = 0
    _slowest: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _waited_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, steps: StepBatch) -> None:
        """The next steps, at least one.

        Those without a slowest rank (of one worker, or the first) count as time.
        """
        self.last_step = int(steps.step[-1])
        seconds, times_s = np.nan_to_num(steps.seconds), known(steps.time)
        self.seconds = added_up(seconds, self.seconds)
        if self.begins_s is None and len(times_s):
            self.begins_s = float(times_s[0] - seconds[~np.isnan(steps.time)][0])
        self.times_s.frombytes(times_s.tobytes())
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


@dataclass(slots=True, kw_only=True)
class Durations:
    """How long steps took, each once: also a step that was done again counts as it was first seen.

    counts: by the upper bound, with one more for those beyond. seconds: all together. highest: the
    newest step that was counted.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    seconds: float = 0.0
    highest: int = 0

    def add(self, steps: StepBatch) -> None:
        own_s = known(steps.seconds[steps.step > self.highest])
        found = np.bincount(np.searchsorted(DURATION_BOUNDS_S, own_s), minlength=len(self.counts))
        self.counts = [before + now for before, now in zip(self.counts, found.tolist(), strict=True)]
        self.seconds += float(own_s.sum())
        self.highest = max(self.highest, int(steps.step.max(initial=0)))


@dataclass(slots=True, kw_only=True)
class StepColumns:
    """last_step: of the last line, 0 where there is none. seconds: of the steps that say how long
    they took. num_audited: steps that were audited. num_unreadable: lines that are none of a step.
    durations: goes on where a new file begins. tallies: by generation.
    """

    last_step: int = 0
    seconds: "array[float]" = field(default_factory=_doubles)
    num_audited: int = 0
    num_unreadable: int = 0
    durations: Durations = field(default_factory=Durations)
    tallies: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, steps: StepBatch) -> None:
        """The next steps, in their order."""
        self.num_unreadable += steps.num_unreadable
        self.durations.add(steps)
        self.num_audited += steps.audited.count(True)
        for generation, own in steps.by_generation():
            self.tallies[generation].add(own)
        if len(steps):
            self.seconds.frombytes(known(steps.seconds).tobytes())
            self.last_step = int(steps.step[-1])


def columns_of(lines: Iterable[StepLine]) -> StepColumns:
    found = StepColumns()
    found.add(batch_of([*lines]))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """share: of the time of the steps, what the group waited for this rank, 0 to 1."""

    rank: int
    node: str
    share: float


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


def floats(values: Sequence[float | None]) -> Floats:
    """NaN for None."""
    return np.array(values, np.float64)


def known(values: Floats) -> Floats:
    """Without NaN."""
    return values[~np.isnan(values)]


def number(value: float) -> float | None:
    """None for NaN."""
    return None if math.isnan(value) else float(value)


def added_up(values: Floats, begin: float) -> float:
    """One by one, from `begin` on: a sum in another order ends in other bits."""
    return float(np.cumsum(np.concatenate([[begin], values]))[-1])
