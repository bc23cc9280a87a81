"""A curve of any length becomes a few points, in which each spike and each gap is still there.

Neighbouring steps form a bucket whose width is a power of two. Of each bucket stay the lowest, the
highest and the first point without a value, which a chart shows as a gap. Buckets of one width lie
within those of twice the width, so the result does not depend on how many steps come at once, and
no more is kept of a million of them. It does not promise the points in between.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from elastic.observe.step_columns import ABSENT, Floats, Ints, StepBatch, floats

MOST_POINTS = 1500  # of one curve
MOST_NAMES = 20  # of the recipe's values that have a curve
_MOST_KNOWN_NAMES = 200
_KEPT_PER_POINT = 8  # points that wait until buckets are made of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """at: steps, ascending. values: None for anything but a finite number.

    bucket: how many steps one bucket spans; 1 where all points are here. gaps: how many steps have
    no finite value, and where the first of these is.
    """

    name: str
    at: list[int]
    values: list[float | None]
    bucket: int = 1
    gaps: int = 0
    first_gap: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """loss, logged: what the recipe logged, over steps; loss is None where it logged none.

    names_left_out: how many names have no curve, since there are more than MOST_NAMES.
    without_number: the names none of whose values is a number. step_s: seconds of each step.
    slowest_s, others_s: of the slowest rank, and the median of the others; None where no step says
    them. time_s: when steps ended, seconds since 1970.
    """

    loss: Series | None
    logged: list[Series]
    names_left_out: int
    without_number: list[str]
    step_s: Series
    slowest_s: Series | None
    others_s: Series | None
    time_s: Series


class Thinned:
    """The points of one curve as they come."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: list[Ints] = []
        self._values: list[Floats] = []
        self._waiting = 0
        self._bucket = 1
        self._gaps = 0
        self._first_gap: int | None = None
        self._newest = np.zeros(0, np.int64), np.zeros(0)

    def add(self, at: Ints, values: Floats) -> None:
        """The next points, in their order; NaN or an infinite number is a gap."""
        if not len(at):
            return
        values = np.where(np.isfinite(values), values, np.nan)
        gaps = at[np.isnan(values)]
        if len(gaps):
            self._first_gap = int(gaps[0]) if self._first_gap is None else self._first_gap
            self._gaps += len(gaps)
        self._at.append(at)
        self._values.append(values)
        self._newest = at[-1:], values[-1:]
        self._waiting += len(at)
        if self._waiting > _KEPT_PER_POINT * self._most:
            self._thin()

    def series(self, name: str, *, tells_gaps: bool = True) -> Series:
        """The newest point, for which a reader asks first, is one of it."""
        self._thin()
        at, values = self._at[0], self._values[0]
        if len(at) and at[-1] != self._newest[0][0]:
            at, values = np.append(at, self._newest[0]), np.append(values, self._newest[1])
        return Series(
            name=name,
            at=at.tolist(),
            values=[None if math.isnan(value) else value for value in values.tolist()],
            bucket=self._bucket,
            gaps=self._gaps if tells_gaps else 0,
            first_gap=self._first_gap if tells_gaps else None,
        )

    def _thin(self) -> None:
        at = np.concatenate([np.zeros(0, np.int64), *self._at])
        values = np.concatenate([np.zeros(0), *self._values])
        # Of each bucket at most three points stay.
        while len(at) > self._most and len(np.unique(at // self._bucket)) > self._most // 3:
            self._bucket *= 2
        if len(at) > self._most or self._bucket > 1:
            kept = _ends(at // self._bucket, values)
            at, values = at[kept], values[kept]
        self._at, self._values, self._waiting = [at], [values], len(at)


def _ends(bucket: Ints, values: Floats) -> Ints:
    """The places of the lowest, the highest and the first gap of each bucket."""
    begins = np.flatnonzero(np.diff(bucket, prepend=bucket[0] - 1))
    of = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(bucket)))
    lowest, highest = np.fmin.reduceat(values, begins)[of], np.fmax.reduceat(values, begins)[of]
    found = [np.flatnonzero(each) for each in (values == lowest, values == highest, np.isnan(values))]
    return np.unique(np.concatenate([each[np.unique(of[each], return_index=True)[1]] for each in found]))


class CurvesOfRun:
    """The curves of a run, whose steps come in batches of any size."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._own = {name: Thinned(most) for name in ("loss", "seconds", "slowest_s", "others_s", "time")}
        self._known = set[str]()  # of these, those that have a value in some step
        self._logged: dict[str, Thinned] = {}
        self._first: dict[str, int] = {}  # by name, the first step with a number

    def add(self, steps: StepBatch) -> None:
        if not len(steps):
            return
        for name, thinned in self._own.items():
            values = _numbers(steps.loss) if name == "loss" else getattr(steps, name)
            is_known = ~np.isnan(values)
            if is_known.any():
                self._known.add(name)
            if name in ("seconds", "time"):  # a step without them has no point
                thinned.add(steps.step[is_known], values[is_known])
            else:
                thinned.add(steps.step, values)
        for name, logged in steps.values.items():
            self._add_logged(name, steps.step, logged)

    def _add_logged(self, name: str, at: Ints, values: list[Any]) -> None:
        if ABSENT in values:
            at = at[np.array([value is not ABSENT for value in values], np.bool_)]
            values = [value for value in values if value is not ABSENT]
        if not values or (name not in self._logged and len(self._logged) == _MOST_KNOWN_NAMES):
            return
        self._logged.setdefault(name, Thinned(self._most)).add(at, _numbers(values))
        if name not in self._first:
            places = (place for place, value in enumerate(values) if isinstance(value, int | float))
            if (place := next(places, None)) is not None:
                self._first[name] = int(at[place])

    def curves(self) -> Curves:
        # However many steps come at once, a name has its turn with its first number.
        shown = sorted(self._first, key=self._first.__getitem__)[:MOST_NAMES]
        return Curves(
            loss=self._own["loss"].series("loss") if "loss" in self._known else None,
            logged=[self._logged[name].series(name) for name in shown],
            names_left_out=len(self._first) - len(shown),
            without_number=sorted(self._logged.keys() - self._first.keys()),
            step_s=self._own["seconds"].series("step time"),
            slowest_s=self._of_ranks("slowest_s", "slowest rank"),
            others_s=self._of_ranks("others_s", "median of the others"),
            time_s=self._own["time"].series("clock"),
        )

    def _of_ranks(self, key: str, name: str) -> Series | None:
        """A step of one worker has no such value: a gap, but no fault."""
        return self._own[key].series(name, tells_gaps=False) if key in self._known else None


def _numbers(values: Sequence[Any]) -> Floats:
    """NaN for anything but a number that a float can hold; True counts as 1."""
    # The usual case is converted at once. A text of digits is no number.
    return floats(values if {*map(type, values)} <= {float, NoneType} else [*map(_number, values)])


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None
