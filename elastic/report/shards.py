"""How many shards each rank computes now, where `--balance` has moved some."""

from collections.abc import Sequence

from elastic.events import GenerationStarted, ShardsMoved
from elastic.observe.logged_event import Events, last

_MOST_RANKS = 8  # named for one number of shards


def shards_by_rank(events: Events) -> list[int]:
    """Of the newest generation, if `--balance` has moved shards there."""
    started, moved = last(events, GenerationStarted), last(events, ShardsMoved)
    if moved is None or (started is not None and moved.generation < started.generation):
        return []
    return moved.event.shards


def shards_text(shards: Sequence[int]) -> str:
    """For a reader: which ranks have how many, the fewest first."""
    of_counts: dict[int, list[int]] = {}
    for rank, count in enumerate(shards):
        of_counts.setdefault(count, []).append(rank)
    parts = []
    for count, ranks in sorted(of_counts.items()):
        named = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
        parts.append(f"{count} on rank{'s' if len(ranks) > 1 else ''} {named}")
    return "; ".join(parts)
