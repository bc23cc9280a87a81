"""A curve of any length becomes a few points, in which each spike and each gap is still there.

Neighbouring steps form a bucket. Of each stay the lowest, the highest and the first point without a
value, which a chart shows as a gap. It does not promise the
points in between.
"""

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from elastic.observe.step_columns import Floats, Ints, StepBatch, StepColumns, known
from elastic.observe.step_line import number

MOST_POINTS = 1500  # of one curve
MOST_NAMES = 20  # of the recipe's values that have a curve
_MOST_KNOWN_NAMES = 200
_DIGITS = 6  # of a value


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

    names_left_out: how many names have no curve, since there are more than MOST_NAMES. step_s:
    seconds of each step. slowest_s, others_s: of the slowest rank, and the median of the others;
    None where no step says them.
    """

    loss: Series | None
    logged: list[Series]
    names_left_out: int
    step_s: Series
    slowest_s: Series | None
    others_s: Series | None


class LoggedValues:
    """What a recipe logged of its steps, by name."""

    def __init__(self) -> None:
        self._at = defaultdict[str, "array[int]"](lambda: array("q"))
        self._values = defaultdict[str, "array[float]"](lambda: array("d"))

    def add(self, batch: StepBatch) -> None:
        for line in batch.lines:
            for name, value in line.values.items():
                if name in self._at or len(self._at) < _MOST_KNOWN_NAMES:
                    self._at[name].append(line.step)
                    self._values[name].append(number(value))

    def curves(self, steps: StepColumns, most: int = MOST_POINTS) -> Curves:
        """steps: the same. most: points of each curve."""

        # A step of one worker has no slowest one: that is no fault, and no gap.
        def without_gaps(name: str, values: Floats) -> Series:
            is_known = ~np.isnan(values)
            return thinned(name, steps.step[is_known], values[is_known], most)

        points = {name: (np.array(at), np.array(self._values[name])) for name, at in self._at.items()}
        numbered = [name for name, (_, values) in points.items() if np.isfinite(values).any()]
        is_shared = len(known(steps.slowest_s)) > 0
        return Curves(
            loss=thinned("loss", steps.step, steps.loss, most) if len(known(steps.loss)) else None,
            logged=[thinned(name, *points[name], most) for name in numbered[:MOST_NAMES]],
            names_left_out=len(numbered[MOST_NAMES:]),
            step_s=without_gaps("step time", steps.seconds),
            slowest_s=without_gaps("slowest rank", steps.slowest_s) if is_shared else None,
            others_s=without_gaps("median of the others", steps.others_s) if is_shared else None,
        )


def thinned(name: str, at: Ints, values: Floats, most: int) -> Series:
    """at, values: of shape (points,), in the order of the steps. The newest point stays too."""
    values = np.where(np.isfinite(values), values, np.nan)
    is_gap = np.isnan(values)
    gaps, bucket, places = at[is_gap], 1, np.arange(len(at))
    if len(at) > most:
        parts = np.array_split(places, most // 3)  # of each at most three points stay
        bucket = len(parts[0])
        highest, lowest = np.where(is_gap, -np.inf, values), np.where(is_gap, np.inf, values)
        kept = {len(at) - 1}
        for own in parts:
            kept |= {own[highest[own].argmax()], own[lowest[own].argmin()], own[is_gap[own].argmax()]}
        places = np.array(sorted(kept))
    found = (float(f"{value:.{_DIGITS}g}") for value in values[places].tolist())
    shown = [None if math.isnan(each) else each for each in found]
    first_gap = int(gaps[0]) if len(gaps) else None
    return Series(
        name=name, at=at[places].tolist(), values=shown, bucket=bucket, gaps=len(gaps), first_gap=first_gap
    )
