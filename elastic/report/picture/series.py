"""What a chart draws of a run's steps: bounded in size, with each spike and each gap.

It does not promise more than six digits of a value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import numpy as np

from elastic.observe.step_batch import ABSENT, Floats, Ints, StepBatch, floats
from elastic.report.picture.thinned import Point, Thinned
from elastic.report.picture.words import short

MOST_POINTS = 1500  # of one series
MOST_NAMES = 20  # of the recipe's own values
_MOST_KEPT_NAMES = 200
_MOST_COUNTED_NAMES = 10_000
_DIGITS = 6
_NUMBERS = (int, float, bool)  # True is drawn as 1, False as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """at: where the points are, ascending. values: None for what is no finite number.

    bucket: of how many points each one that is shown is the lowest or the highest; 1 where all are
    shown. gaps: how many have no finite value, and where the first of these is.
    """

    name: str
    unit: str
    at: list[float]
    values: list[float | None]
    bucket: int
    gaps: int
    first_gap: float | None


def of_points(name: str, points: Sequence[Point], *, unit: str = "", most: int = MOST_POINTS) -> Series:
    thinned = Thinned(most)
    thinned.extend(np.array([at for at, _ in points]), floats([value for _, value in points]))
    return _of_thinned(name, thinned, unit=unit)


class RunSeries:
    """The steps of a run as they come; a batch may have any number of them."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        """most: points of each series."""
        self._most = most
        self._loss, self._has_loss = Thinned(most), False
        self._of_names: dict[str, Thinned] = {}
        self._numbers: dict[str, None] = {}  # names of numbers, in the order of their first one
        self._others: dict[str, None] = {}  # names that had no number yet
        self._own = {
            "seconds": Thinned(most),
            "slowest_s": Thinned(most),
            "others_s": Thinned(most),
            "time": Thinned(min(most, 600)),
        }

    def add(self, steps: StepBatch) -> None:
        """The next steps."""
        loss = _numbers(steps.loss, {*map(type, steps.loss)})
        self._has_loss = self._has_loss or bool(np.isfinite(loss).any())
        self._loss.extend(steps.step, loss)
        # A name has its turn with its first number, however many steps come at once.
        new: dict[str, int] = {}
        for name, values in steps.values.items():
            kinds = self._add_value(name, steps.step, values)
            if name in self._numbers or not kinds:
                continue
            if not kinds.isdisjoint(_NUMBERS):
                new[name] = next(at for at, value in enumerate(values) if type(value) in _NUMBERS)
            elif len(self._others) < _MOST_COUNTED_NAMES:
                self._others[name] = None
        for name in sorted(new, key=new.__getitem__):
            self._others.pop(name, None)
            if len(self._numbers) < _MOST_COUNTED_NAMES:
                self._numbers[name] = None
        for key, own in (("seconds", steps.seconds), ("time", steps.time)):
            # Steps without the value have no point.
            is_known = ~np.isnan(own)
            self._own[key].extend(steps.step[is_known], own[is_known])
        for key, own in (("slowest_s", steps.slowest_s), ("others_s", steps.others_s)):
            self._own[key].extend(steps.step, own)

    def logged(self, most: int = MOST_POINTS) -> tuple[list[Series], int]:
        """The loss, if there is one, and the numbers that the recipe logged, over steps.

        Also says how many names were left out, since there are more than MOST_NAMES. most: points
        of each, as below.
        """
        # A line has None for a loss that is not finite, and for none: of a recipe that logs none,
        # all.
        found = [_of_thinned("loss", self._loss.within(most))] if self._has_loss else []
        shown = [name for name in self._numbers if name in self._of_names][:MOST_NAMES]
        found += [_of_thinned(name, self._of_names[name].within(most)) for name in shown]
        return found, len(self._numbers) - len(shown)

    @property
    def without_number(self) -> list[str]:
        """The names that were logged without any number, such as texts: they have no chart."""
        return sorted(self._others)

    def step_time(self, most: int = MOST_POINTS) -> Series:
        return _of_thinned("step time", self._own["seconds"].within(most), unit="s")

    def slowest(self, most: int = MOST_POINTS) -> Series | None:
        """Seconds of the slowest rank; None where no step says them."""
        return self._of_ranks("slowest rank", "slowest_s", most)

    def others(self, most: int = MOST_POINTS) -> Series | None:
        """The median of the other ranks' own seconds; None where no step says them."""
        return self._of_ranks("median of the others", "others_s", most)

    def clock(self, began_s: float, most: int = MOST_POINTS) -> Series:
        """When a step ended, in seconds since `began_s`, which is in seconds since 1970."""
        return _of_thinned("clock", self._own["time"].within(most), unit="s", since=began_s)

    def _of_ranks(self, name: str, key: str, most: int) -> Series | None:
        """A step of one worker, or the first one, has no such value: a gap, but no fault."""
        found = _of_thinned(name, self._own[key].within(most), unit="s", whole_gaps=True)
        is_known = found.values.count(None) < len(found.values)
        return replace(found, gaps=0, first_gap=None) if is_known else None

    def _add_value(self, name: str, steps: Ints, found: list[Any]) -> set[type]:
        """Steps that did not log the name have no point. Returns the types of the values."""
        kinds = {*map(type, found)}
        if type(ABSENT) in kinds:
            kinds.discard(type(ABSENT))
            is_there = np.array([value is not ABSENT for value in found])
            steps, found = steps[is_there], [value for value in found if value is not ABSENT]
        if not found:
            return set()
        if name in self._of_names or len(self._of_names) < _MOST_KEPT_NAMES:
            self._of_names.setdefault(name, Thinned(self._most)).extend(steps, _numbers(found, kinds))
        return kinds


def _of_thinned(
    name: str, thinned: Thinned, *, unit: str = "", since: float = 0.0, whole_gaps: bool = False
) -> Series:
    shown = thinned.points(whole_gaps=whole_gaps)
    return Series(
        name=short(name),
        unit=unit,
        at=[at for at, _ in shown],
        values=[None if value is None else float(f"{value - since:.{_DIGITS}g}") for _, value in shown],
        bucket=thinned.bucket,
        gaps=thinned.gaps,
        first_gap=thinned.first_gap,
    )


def number(value: Any) -> float | None:
    """None for what is no finite number."""
    if type(value) not in _NUMBERS:
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _numbers(values: list[Any], kinds: set[type]) -> Floats:
    """NaN for what is no finite number. kinds: the types of the values."""
    if kinds <= {float, NoneType}:
        found = floats(values)
        found[np.isinf(found)] = np.nan
        return found
    return floats([*map(number, values)])
