"""A sum over S leaves is one fixed binary tree of additions, whoever holds which leaves.

The tree is the perfect binary tree over the next power of two; a node whose right half has no leaves passes its left half through.
A rank holds a contiguous span of leaves, adds up the maximal aligned subtrees (blocks) inside it, and the blocks of all ranks fold
to the root. Addition of two IEEE numbers commutes, so the value depends on the tree alone: bit for bit the same for every grouping.
It does not promise that the sum is more accurate than another order; only that it is always the same one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Add = Callable[[T, T], T]


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """The subtree over leaves [start, start + size); size is a power of two and divides start."""

    start: int
    size: int

    @property
    def is_left(self) -> bool:
        return self.start & self.size == 0

    @property
    def sibling(self) -> "Block":
        return Block(self.start ^ self.size, self.size)

    @property
    def parent(self) -> "Block":
        return Block(self.start & ~self.size, 2 * self.size)


def span(shards: int, world_size: int, rank: int) -> range:
    """The leaves of `rank`: contiguous, in rank order, sizes differ by at most one; world_size need not divide shards."""
    assert 0 <= rank < world_size <= shards
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)


def blocks(leaves: range) -> tuple[Block, ...]:
    """The maximal aligned subtrees that cover a contiguous span of leaves, left to right."""
    found = []
    start = leaves.start
    while start < leaves.stop:
        size = start & -start or 1 << (leaves.stop - 1).bit_length()
        while start + size > leaves.stop:
            size //= 2
        found.append(Block(start, size))
        start += size
    return tuple(found)


def fold(parts: dict[Block, T], shards: int, add: Add[T]) -> T:
    """The root of the tree from blocks that together cover all leaves exactly once. `add` may reuse its first argument."""
    known = dict(parts)
    top = 1 << (shards - 1).bit_length()
    size = 1
    while size < top:
        for start in range(0, shards, 2 * size):
            left, right = Block(start, size), Block(start + size, size)
            if left in known and right.start >= shards:
                known[left.parent] = known.pop(left)
            elif left in known and right in known:
                known[left.parent] = add(known.pop(left), known.pop(right))
        size *= 2
    assert set(known) == {Block(0, top)}, f"blocks {sorted(parts)} do not cover {shards} leaves exactly once"
    return known[Block(0, top)]


class Stack(Generic[T]):
    """Adds up a span's leaves as they come, left to right, and holds at most log2 of them at once.

    `add` may reuse its first argument; the second is not used again.
    """

    def __init__(self, add: Add[T]) -> None:
        self._add = add
        self.parts: dict[Block, T] = {}

    def push(self, block: Block, value: T) -> None:
        while not block.is_left and block.sibling in self.parts:
            value = self._add(self.parts.pop(block.sibling), value)
            block = block.parent
        self.parts[block] = value


def pairs(leaves: range) -> tuple[range, ...]:
    """The span cut into aligned pairs of leaves, and singles where a partner belongs to another rank.

    The two leaves of a pair may be added up in place, for instance by autograd in `.grad`: it is the tree's first level.
    """
    cut = []
    leaf = leaves.start
    while leaf < leaves.stop:
        width = 2 if leaf % 2 == 0 and leaf + 1 < leaves.stop else 1
        cut.append(range(leaf, leaf + width))
        leaf += width
    return tuple(cut)
