"""How many shards each rank computes follows from how long each of them worked.

The result of a step does not depend on who computes which shard (tree.py), so a slow machine may
get fewer of them, but one at least. A rank's own seconds in a step are counted as so many for each
of its shards. Where a part of them is fixed, the first split moves too few shards, and the next
ones move the rest. The best split is the one whose slowest rank is the fastest.

Steps are looked at in windows. A window proposes a split where that gains more than `LEAST_GAIN`,
and the next window, whose noise is another one, must confirm it. What the ranks need now is then
counted low (a quartile of each rank's steps), and what they would need is not: noise alone moves
nothing.

All ranks have the same numbers and get the same split without a message. It does not see what more
blocks of a span cost in the exchange, nor the memory of a rank that gets more shards.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from operator import mul

WINDOW_STEPS, WINDOW_S, LONGEST_WINDOW = 16, 0.5, 256  # steps at least; seconds too; steps at most
LEAST_GAIN = 1.05

OwnSeconds = Sequence[float]  # of each rank, in one step
Counts = tuple[int, ...]  # how many shards each rank has


def best_split(shard_s: Sequence[float], shards: int) -> Counts:
    """The numbers of shards, one at least, with which the slowest rank is the fastest.

    shard_s: the seconds of each rank for a shard. One shard after the other goes to the rank that
    will have the least seconds with it: since seconds grow with shards, no other split is better.
    """
    counts = [1] * len(shard_s)
    waiting = [(2 * seconds, rank) for rank, seconds in enumerate(shard_s)]
    heapify(waiting)
    for _ in range(shards - len(shard_s)):
        _, rank = waiting[0]
        counts[rank] += 1
        heapreplace(waiting, ((counts[rank] + 1) * shard_s[rank], rank))
    return tuple(counts)


class Balance:
    """The split of each step of one generation.

    Call `add` after each step, and `counts` for a step at most `reads_ahead` steps after the one
    that follows: so far ahead the split is known. reads_ahead: alike on every rank.
    """

    def __init__(self, equal: Counts, reads_ahead: int) -> None:
        """equal: the split that the generation begins with."""
        self._lead = reads_ahead + 1
        self._shards = sum(equal)
        # The split before the first step of the newest one, and from it on.
        self._now, self._next, self.effective = equal, equal, 0
        self._known = 0  # the last step whose split is known; 0 before the first `add`
        self._steps: list[OwnSeconds] = []  # of the window
        self._seconds = 0.0  # of its steps
        self._proposed: Counts | None = None

    def counts(self, step: int) -> Counts:
        """How many shards each rank has in this step."""
        assert not self._known or step <= self._known, "the split of this step is not decided yet"
        return self._next if step >= self.effective else self._now

    def add(self, step: int, own_s: OwnSeconds | None) -> Counts | None:
        """A step is over: returns the split that is decided by it, from `effective` on, if one is.

        own_s: None for a step that says nothing, such as an audited one.
        """
        self._known = step + self._lead
        # The first step of a split is one in which much is done for the first time.
        if step <= self.effective or not own_s:
            return None
        self._steps.append(own_s)
        self._seconds += max(own_s)
        is_long = len(self._steps) >= WINDOW_STEPS and self._seconds >= WINDOW_S
        if not is_long and len(self._steps) < LONGEST_WINDOW:
            return None
        split, self._seconds = self._end_window(), 0.0
        if split is None or split == self._next:
            return None
        self._now, self._next, self.effective = self._next, split, self._known
        return split

    def _end_window(self) -> Counts | None:
        """The counts that it decides, None for no change."""
        of_ranks = list(map(sorted, zip(*self._steps, strict=True)))
        middle, quarter = len(self._steps) // 2, len(self._steps) // 4
        self._steps = []
        shard_s = [seconds[middle] / count for count, seconds in zip(self._next, of_ranks, strict=True)]
        now_s: float = max(seconds[quarter] for seconds in of_ranks)

        def gains(split: Counts) -> bool:
            """Whether the slowest rank would be faster by more than the least gain."""
            slowest_s: float = max(map(mul, shard_s, split))
            return now_s > LEAST_GAIN * slowest_s

        proposed, self._proposed = self._proposed, None
        if proposed is not None and gains(proposed):
            return proposed
        best = best_split(shard_s, self._shards)
        self._proposed = best if gains(best) else None
        return None
