"""From the same reports all nodes compute the same nodes to exclude; none of them could stay.

Nodes can meet through a folder, or through servers, that all of them reach while the network
between the nodes themselves is broken. Then every heartbeat goes on and every collective stands
still. Some nodes must go so that the others can train, and all nodes must agree which. They do so
without a further message: each applies this function to the reports in the group. Two nodes that
take other nodes for alive may differ for a moment; compare-and-set lets one of them form.

Nodes of a small group all probe each other. If all pairs of a wide one did, probes would grow with
the square of the group: its nodes stand in a ring, ordered by a hash of the names, and each node
probes those at a few distances there. A change of membership changes few of these links; and
whichever part of the group is cut off, a node of it probes nodes of the rest, but for one chance in
65 000. All nodes compute the same graph from the group; no message is needed.

It does not promise that no smaller set would do for more than five nodes, nor that the nodes that
stay keep reaching each other. In a wide group, a broken link between two nodes that do not probe
each other is not seen at all.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

# In keep-alive periods: of silence, until a node is reported; and until the reports have arrived.
UNREACHABLE_AFTER = 1.5
SETTLED_AFTER = 0.25

ALL_PAIRS = 32  # up to so many nodes, each probes every other
# To either side in the ring: in a group of more nodes than that, each leads to another node.
STEPS = (1, 2, 4, 6, 9, 11, 14, 16)

Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableReport:
    """`node` and each of `peers` cannot exchange packets in both directions."""

    node: str
    peers: tuple[str, ...]


@lru_cache(maxsize=65536)
def _place(name: str) -> bytes:
    """Where `name` stands in the ring, the same on every node and for ever."""
    return hashlib.blake2b(name.encode(), digest_size=8).digest() + name.encode()


@lru_cache(maxsize=16)
def ring(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=_place))


@lru_cache(maxsize=8)
def probe_graph(names: frozenset[str]) -> Graph:
    """By name, the other nodes that a node probes; it is symmetric."""
    if len(names) <= ALL_PAIRS:
        return {name: names - {name} for name in names}
    order = ring(names)
    both_ways = (*STEPS, *(-step for step in STEPS))
    return {
        name: frozenset(order[(at + step) % len(order)] for step in both_ways)
        for at, name in enumerate(order)
    }


def nodes_to_exclude(order: Sequence[str], reports: Iterable[UnreachableReport]) -> tuple[str, ...]:
    """The nodes of `order` without which all others in `order` reach each other, in this order.

    In a wide group few links are probed. Two nodes that no chain of working links connects any more
    are taken for cut off from each other, and the largest such part stays.

    Links are edges of a graph, and the nodes that stay are an independent set: no two of them share
    a broken link. The largest such set is NP-hard to find, so this takes the usual greedy one: the
    node with the fewest broken links stays, those that it cannot reach go, and so on with the rest.
    The one node with the broken cable goes, because it is an end of every broken link. Among nodes
    with equally many broken links the first in `order` stays, so that rank 0 stays if it can. Of
    two nodes this keeps the first, though its own cable may be the broken one: the reports of two
    nodes cannot tell.
    """
    names, links = frozenset(order), broken_by_node(reports)
    broken = {name: links.get(name, set()) & names for name in order}
    if not any(broken.values()):
        return ()
    left, stay = list(order), set[str]()
    if len(order) > ALL_PAIRS:
        largest = _largest_part(order, probe_graph(names), broken)
        left = [name for name in order if name in largest]
    while left:
        remaining = set(left)
        missing = {name: len(broken[name] & remaining) for name in left}
        first = min(left, key=missing.__getitem__)
        # All that reach everything would be the next to stay, one after another.
        stay |= {name for name in left if not missing[name]} | {first}
        left = [name for name in left if name not in stay and name not in broken[first]]
    return tuple(name for name in order if name not in stay)


def broken_by_node(reports: Iterable[UnreachableReport]) -> dict[str, set[str]]:
    """By node, those to which its link is broken, by one report; only nodes that have one."""
    found: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        for peer in report.peers:
            if peer != report.node:
                found[report.node].add(peer)
                found[peer].add(report.node)
    return found


def _largest_part(order: Sequence[str], graph: Graph, broken: Mapping[str, set[str]]) -> set[str]:
    """Of nodes that working links connect; of parts of one size that with the first in `order`."""
    largest, seen = set[str](), set[str]()
    for start in order:
        part, reached = {start}, [start]
        while reached and start not in seen:
            name = reached.pop()
            found = graph[name] - broken[name] - part
            part |= found
            reached.extend(found)
        seen |= part
        largest = part if len(part) > len(largest) else largest
    return largest
