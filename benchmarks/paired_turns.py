"""Two programs are compared by neighbouring turns, which the rest of the machine disturbs alike.

Nothing here knows programs or files: the functions take the moments at which steps ended.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Program = TypeVar("Program")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The steps that lie in a turn whole, and how long they took together."""

    steps: int
    seconds: float

    @property
    def step_s(self) -> float:
        """The mean, in which each interruption counts."""
        return self.seconds / self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of the ratios of all pairs, with its spread.

    lower, upper: half of the pairs are between them. error: the standard error of the median of as
    many normal values with these quartiles; of ten pairs it is a fifth too large.
    """

    median: float
    lower: float
    upper: float
    error: float
    pairs: int


def whole_steps(ends_s: Sequence[float], began_s: float, ended_s: float) -> Turn | None:
    """ends_s: when each step ended, ascending. None if no step lies in the turn whole.

    The first end in a turn is that of a step which was stopped in the middle.
    """
    inside = [end for end in ends_s if began_s < end < ended_s]
    if len(inside) < 2:
        return None
    return Turn(steps=len(inside) - 1, seconds=inside[-1] - inside[0])


def in_order(programs: Sequence[Program], number: int) -> list[Program]:
    """Whose turn it is, in the round of this number.

    Each second round goes backwards: a machine that becomes slower during a round makes the last
    program slow, and that must not be the same one each time.
    """
    return [*programs] if number % 2 == 0 else [*reversed(programs)]


def ratio(own: Sequence[float], others: Sequence[float]) -> Ratio:
    """own, others: seconds of a step, turn by turn. Raises ValueError for under three pairs."""
    if len(own) != len(others) or len(own) < 3:
        raise ValueError(f"expected three or more pairs of turns, found {len(own)} and {len(others)} turns")
    ratios = [mine / theirs for mine, theirs in zip(own, others, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    # Half of normal values are within 1.349 standard deviations. 1.2533 is the square root of
    # pi / 2: the median of normal values is that much worse than the mean. A standard deviation of
    # the ratios themselves would be that of the few turns in which another program had the cores.
    error = 1.2533 * (upper - lower) / 1.349 / len(ratios) ** 0.5
    return Ratio(median=median, lower=lower, upper=upper, error=error, pairs=len(ratios))


def is_disturbed(steps: Sequence[int]) -> bool:
    """Whether steps were lost or done again. steps: the numbers of a program's lines."""
    return any(after != before + 1 for before, after in pairwise(steps))
