"""What the report and the metrics say of slow ranks, bounded in size."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.observe.step_line import StepLine
from elastic.report.picture import series
from elastic.report.picture.series import Series
from elastic.report.picture.words import short
from elastic.report.report import Report

_MOST_RANKS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankShare:
    """share: of the group's time, that was lost to this rank."""

    rank: int
    node: str
    share: float


def slow_ranks(report: Report) -> list[SlowRankShare]:
    """Those that cost the most first."""
    ranked = sorted(report.slow_ranks, key=lambda each: -each.share)[:_MOST_RANKS]
    return [SlowRankShare(rank=each.rank, node=short(each.node), share=each.share) for each in ranked]


def slowest_series(lines: Sequence[StepLine], most: int) -> tuple[Series | None, Series | None]:
    """(seconds of the slowest rank, median of the others' own seconds), over steps."""
    slowest = series.over_steps(lines, lambda line: line.slowest_s)
    others = series.over_steps(lines, lambda line: line.others_s)
    return (
        series.of_points("slowest rank", slowest, unit="s", most=most) if slowest else None,
        series.of_points("median of the others", others, unit="s", most=most) if others else None,
    )
