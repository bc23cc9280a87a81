"""A sum over S leaves is one fixed binary tree of additions, whichever rank holds which leaves.

The tree is the perfect binary tree over the next power of two. A node whose right half has no
leaves passes its left half through. A rank holds a contiguous span of leaves, adds up the maximal
aligned subtrees (blocks) inside it, and the blocks of all ranks fold to the root. Addition of two
IEEE 754 numbers commutes but does not associate, so the value depends on the tree alone: bit for
bit the same for every grouping of leaves into ranks.

Numbers of different shards are added in three places and nowhere else: autograd adds an aligned
pair of one rank in `.grad` (bucket.py), `Stack` adds up the blocks of one rank, and `Exchange` adds
the blocks of all ranks (exchange.py: `fold` for each chunk, or one all-reduce of two). `Step.sum`
and the end-of-step all-reduce of losses and buffers go through the last two. The gradients of a
penalty, which are equal on every rank, are added once to the sum over shards (`Step.backward`).

It does not promise that the sum is more accurate than another order; only that it is always the
same. Which of two NaNs an addition passes on is left open by IEEE 754: all NaNs count as one.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, groupby
from operator import add as add_numbers
from typing import Generic, TypeVar

T = TypeVar("T")
Add = Callable[[T, T], T]


# (start, size): the subtree over leaves [start, start + size); size is a power of two and divides
# start. Blocks are in the order of their starts.
Block = tuple[int, int]


def span(shards: int, world_size: int, rank: int) -> range:
    """The leaves of `rank`: contiguous, in rank order; sizes differ by at most one.

    world_size need not divide shards.
    """
    assert 0 <= rank < world_size <= shards
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)


def spans_of(counts: Sequence[int]) -> list[range]:
    """The leaves of each rank, so many each: contiguous, in rank order."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


@lru_cache(maxsize=64)
def blocks(leaves: range) -> tuple[Block, ...]:
    """The maximal aligned subtrees that cover a contiguous span of leaves, left to right."""
    stack: Stack[None] = Stack(lambda _left, _right: None)
    for leaf in leaves:
        stack.push((leaf, 1), None)
    return tuple(stack.parts)


def fold(parts: dict[Block, T], shards: int, add: Add[T]) -> T:
    """The root of the tree, from blocks that together cover all leaves exactly once.

    `add` may reuse its first argument.
    """
    if parts.keys() == {(0, shards)}:
        return parts[0, shards]
    stack = Stack(add)
    for block in sorted(parts):
        stack.push(block, parts[block])
    is_whole = tuple(stack.parts) == blocks(range(shards))
    assert is_whole, f"blocks {sorted(parts)} do not cover {shards} leaves exactly once"
    # The rest are subtrees of falling size, of 7 leaves those of 4, 2 and 1. The right half of a
    # node is all that lies to the right of its left half: 4 + (2 + 1).
    return reduce(lambda right, left: add(left, right), reversed(stack.parts.values()))


def total(leaves: Sequence[float]) -> float:
    """The root of the tree over plain numbers, all leaves at once."""
    row = list(leaves)
    while len(row) > 1:
        ends = row[len(row) & ~1 :]  # without a sibling: it passes through
        row = [*map(add_numbers, row[::2], row[1::2]), *ends]
    return row[0]


class Stack(Generic[T]):
    """Adds up a span's leaves as they come, left to right or right to left, and holds about twice
    log2 of them at once, at most.

    This is a binary counter: a value waits until its sibling of the same size is complete, then the
    two merge, and the merged value may merge again. The rest of `parts` after the last leaf is
    exactly `blocks(span)`, so that ranks know each other's blocks without asking.
    `add` may reuse its first argument; the second is not used again.
    """

    def __init__(self, add: Add[T]) -> None:
        self._add = add
        self.parts: dict[Block, T] = {}

    def push(self, block: Block, value: T) -> None:
        start, size = block
        # The starts of two siblings differ in the bit of their size: together they are aligned to
        # 2 * size.
        while (sibling := (start ^ size, size)) in self.parts:
            other = self.parts.pop(sibling)
            value = self._add(other, value) if start & size else self._add(value, other)
            start, size = start & ~size, 2 * size
        self.parts[start, size] = value


@lru_cache(maxsize=8)
def pairs(leaves: range, alone: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The span cut into aligned pairs of leaves, and singles whose partner another rank holds.

    alone: a leaf that stays by itself, so that its value can be read before the sum has it.

    The two leaves of a pair may be added in place, for instance by autograd in `.grad`: that
    addition is a node of the tree's first level. A third leaf on top would not be, because `.grad`
    would hold (a + b) + c where the tree has (a + b) + (c + d).
    """
    return tuple(tuple(pair) for _, pair in groupby(leaves, lambda leaf: (leaf // 2, leaf == alone)))
