"""What the report says of slow ranks, bounded in size."""

from dataclasses import dataclass

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
