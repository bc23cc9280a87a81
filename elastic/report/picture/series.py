"""A series of any length becomes a few points, in which each spike and each gap is still there.

Neighbouring points form a bucket; of each bucket stay the lowest, the highest, and the first
without a finite value, which a chart shows as a gap. It does not promise the points in between, nor
more than six digits of a value.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.observe.step_line import StepLine
from elastic.report.picture.words import short

MOST_POINTS = 1500  # of one series
MOST_NAMES = 20  # of the recipe's own values
_DIGITS = 6

Point = tuple[float, float | None]


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
    bucket = 1 if len(points) <= most else math.ceil(len(points) / (most // 3))
    shown = [*points] if bucket == 1 else _thinned(points, bucket)
    gaps = [at for at, value in points if value is None]
    return Series(
        name=short(name),
        unit=unit,
        at=[at for at, _ in shown],
        values=[None if value is None else float(f"{value:.{_DIGITS}g}") for _, value in shown],
        bucket=bucket,
        gaps=len(gaps),
        first_gap=gaps[0] if gaps else None,
    )


def logged(lines: Sequence[StepLine], most: int = MOST_POINTS) -> tuple[list[Series], int]:
    """The loss, if there is one, and the numbers that the recipe logged, over steps.

    Also says how many names were left out, since there are more than MOST_NAMES.
    """
    names = _names(lines)
    loss: list[Point] = [(line.step, number(line.loss)) for line in lines]
    # A line has None for a loss that is not finite, and for none: of a recipe that logs none, all.
    found = [("loss", loss)] if any(value is not None for _, value in loss) else []
    found += [(name, _of_name(lines, name)) for name in names[:MOST_NAMES]]
    return [of_points(name, points, most=most) for name, points in found], max(0, len(names) - MOST_NAMES)


def over_steps(lines: Sequence[StepLine], value_of: Callable[[StepLine], float | None]) -> list[Point]:
    """The steps that have the value."""
    return [(line.step, value) for line in lines if (value := value_of(line)) is not None]


def number(value: Any) -> float | None:
    """None for what is no finite number."""
    if type(value) not in (int, float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _names(lines: Sequence[StepLine]) -> list[str]:
    """Those under which a number was logged, in the order of their first line."""
    found: dict[str, None] = {}
    for line in lines:
        for name, value in line.values.items():
            if name not in found and type(value) in (int, float):
                found[name] = None
    return [*found]


def _of_name(lines: Sequence[StepLine], name: str) -> list[Point]:
    return [(line.step, number(line.values[name])) for line in lines if name in line.values]


def _thinned(points: Sequence[Point], bucket: int) -> list[Point]:
    shown = [
        point
        for begin in range(0, len(points), bucket)
        for point in _of_bucket(points[begin : begin + bucket])
    ]
    # The newest value is the one that a reader asks for first.
    return shown if shown[-1] == points[-1] else [*shown, points[-1]]


def _of_bucket(points: Sequence[Point]) -> Iterable[Point]:
    """At most three, in their order."""
    finite = [(value, index) for index, (_, value) in enumerate(points) if value is not None]
    kept = {min(finite)[1], max(finite)[1]} if finite else set()
    kept |= set([index for index, (_, value) in enumerate(points) if value is None][:1])
    return [points[index] for index in sorted(kept)]
