"""Neighbouring lines of metrics as an array for each field: a million are added up at once.

Numbers are added up one by one, in the order of the steps: no figure depends on how many lines come
at once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elastic.observe.step_line import StepLine

ABSENT = object()  # the value of a name that a line does not have
NO_CLOCK: Mapping[int, float] = {}  # is ahead
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class ReadStep(Protocol):
    """What counts of a line, whatever read it: a StepLine, but for the recipe's values."""

    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def loss(self) -> Any: ...
    @property
    def chain(self) -> Any: ...
    @property
    def world_size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def time(self) -> float | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def audited(self) -> bool | None: ...
    @property
    def slowest_rank(self) -> int | None: ...
    @property
    def slowest_s(self) -> float | None: ...
    @property
    def others_s(self) -> float | None: ...


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
            yield int(self.generation[begin]), self._part(slice(begin, end))

    def moved(self, ahead: Mapping[int, float]) -> "StepBatch":
        """With the times of one clock. ahead: by generation, seconds (one_clock.py)."""
        if not any(ahead.values()):
            return self
        by_s = floats([ahead.get(number, 0.0) for number in self.generation.tolist()])
        return replace(self, time=self.time - by_s)

    def _part(self, part: slice) -> "StepBatch":
        return StepBatch(
            step=self.step[part],
            epoch=self.epoch[part],
            loss=self.loss[part],
            chain=self.chain[part],
            world_size=self.world_size[part],
            generation=self.generation[part],
            time=self.time[part],
            seconds=self.seconds[part],
            audited=self.audited[part],
            slowest_rank=self.slowest_rank[part],
            slowest_s=self.slowest_s[part],
            others_s=self.others_s[part],
        )


def batch_of(lines: Sequence[ReadStep], values: Mapping[str, list[Any]] | None = None) -> StepBatch:
    return StepBatch(
        step=np.array([line.step for line in lines], np.int64),
        epoch=[line.epoch for line in lines],
        loss=[line.loss for line in lines],
        chain=[line.chain for line in lines],
        world_size=[line.world_size for line in lines],
        generation=np.array([line.generation for line in lines], np.int64),
        time=floats([line.time for line in lines]),
        seconds=floats([line.seconds for line in lines]),
        audited=[line.audited for line in lines],
        slowest_rank=floats([line.slowest_rank for line in lines]),
        slowest_s=floats([line.slowest_s for line in lines]),
        others_s=floats([line.others_s for line in lines]),
        values=values or {},
    )


def with_values(lines: Sequence[StepLine]) -> StepBatch:
    names = dict.fromkeys(name for line in lines for name in line.values)
    return batch_of(lines, {name: [line.values.get(name, ABSENT) for line in lines] for name in names})


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
