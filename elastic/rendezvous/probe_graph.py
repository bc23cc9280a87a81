"""Nodes of a small group all probe each other; a node of a wide one probes a bounded number.

If all pairs did, probes would grow with the square of the group. In a wide group the members stand
in a ring, and each probes those at `OFFSETS` distances on both sides of it: some next to it, some
across. The ring is ordered by a hash of the names, so that machines of one rack or zone, whose
names and ranks are alike, do not stand side by side: whichever part of the group is cut off, each
node of the smaller part probes nodes of the larger one, but for one chance in 65 000. A node that
is cut off by itself is missed by all that probe it.

All nodes compute the same graph from the members in the group's state; no message is needed. A
broken link between two nodes that do not probe each other is not seen here: `link_sweep` finds it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

ALL_PAIRS = 16  # up to so many nodes, each probes every other
OFFSETS = 8
NEWCOMERS = 2  # that a member probes at most, and members that probe one newcomer

Graph = Mapping[str, frozenset[str]]


@lru_cache(maxsize=65536)
def place(name: str) -> bytes:
    """Where `name` stands in the ring, the same on every node and for ever."""
    return hashlib.blake2b(name.encode(), digest_size=8).digest() + name.encode()


@lru_cache(maxsize=8)
def members_graph(members: tuple[str, ...]) -> Graph:
    """By name, the other members that a member probes; it is symmetric."""
    if len(members) <= max(ALL_PAIRS, 2 * OFFSETS + 1):
        return {name: frozenset(members) - {name} for name in members}
    ring, size = sorted(members, key=place), len(members)
    return {
        name: frozenset(ring[(at + step) % size] for each in _offsets(size) for step in (each, -each))
        for at, name in enumerate(ring)
    }


def _offsets(size: int) -> tuple[int, ...]:
    """Distances from 1 to nearly half of the ring, each about the same factor above the last."""
    found: list[int] = []
    for number in range(OFFSETS):
        step = round(((size - 1) // 2) ** (number / (OFFSETS - 1)))
        found.append(max(step, found[-1] + 1 if found else 1))
    return tuple(found)


def peers_of(me: str, members: tuple[str, ...], newcomers: Sequence[str]) -> frozenset[str]:
    """The nodes that `me` probes, and that probe `me`. newcomers: in order of arrival.

    The first newcomers are probed by `NEWCOMERS` members each, as long as no member has more of
    them. Those behind them are probed once they are in front, or members.
    """
    if len(members) + len(newcomers) <= ALL_PAIRS:
        return frozenset((*members, *newcomers)) - {me}
    if not members:  # no generation was formed yet
        return members_graph(tuple(newcomers)).get(me, frozenset())
    each = min(NEWCOMERS, len(members))
    if me not in members:
        at = newcomers.index(me) if me in newcomers else len(members)
        return frozenset(
            members[(at * each + i) % len(members)] for i in range(each if at < len(members) else 0)
        )
    mine = (members.index(me) + turn * len(members) for turn in range(each))
    come = (newcomers[slot // each] for slot in mine if slot // each < len(newcomers))
    return members_graph(members)[me].union(come)
