"""Neighbouring lines of metrics as an array for each field: a million are added up at once.

Numbers are added up one by one, in the order of the steps: no figure depends on how many lines come
at once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.observe.step_line import NAMES, OwnFields, StepLine

ABSENT = object()  # the value of a name that a line does not have
NO_CLOCK: Mapping[int, float] = {}  # is ahead
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_ARRAYS = {"step": np.int64, "generation": np.int64} | dict.fromkeys(
    ("time", "seconds", "slowest_rank", "slowest_s", "others_s"), np.float64
)


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
        return StepBatch(**{name: getattr(self, name)[part] for name in NAMES})


def batch_of(
    lines: Sequence[OwnFields] | Sequence[StepLine], values: Mapping[str, list[Any]] | None = None
) -> StepBatch:
    columns: dict[str, Any] = {name: [*map(attrgetter(name), lines)] for name in NAMES}
    arrays = {name: np.array(columns[name], kind) for name, kind in _ARRAYS.items()}
    return StepBatch(**(columns | arrays), values=values or {})


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
