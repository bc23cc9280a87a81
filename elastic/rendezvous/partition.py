"""From the same reports all nodes compute the same nodes to exclude, of which none could stay.

Nodes can meet through a folder, or through servers, that all of them reach while the network
between the nodes themselves is broken. Then every heartbeat goes on and every collective stands
still. Some nodes must go so that the others can train, and all nodes must agree which. They do so
without a further message: each applies this function to the reports in the group. Two nodes that
take other nodes for alive may differ for a moment; compare-and-set lets one of them form.

It does not promise that no smaller set would do for more than five nodes, nor that the nodes that
stay keep reaching each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableReport:
    """`node` and each of `peers` cannot exchange packets in both directions."""

    node: str
    # The file keeps the key of the first version that wrote it.
    peers: tuple[str, ...] = field(metadata={"key": "unheard"})


def broken_links(reports: Iterable[UnreachableReport]) -> frozenset[frozenset[str]]:
    """The pairs of nodes of which at least one has reported the other."""
    pairs = ((report.node, peer) for report in reports for peer in report.peers)
    return frozenset(frozenset(pair) for pair in pairs if pair[0] != pair[1])


def nodes_to_exclude(order: Sequence[str], reports: Iterable[UnreachableReport]) -> tuple[str, ...]:
    """The nodes of `order` without which all others in `order` reach each other, in this order.

    Links are edges of a graph, and the nodes that stay are an independent set: no two of them share
    a broken link. The largest such set is NP-hard to find, so this takes the usual greedy one: the
    node with the fewest broken links stays, those that it cannot reach go, and so on with the rest.
    The one node with the broken cable goes, because it is an end of every broken link. Among nodes
    with equally many broken links the first in `order` stays, so that rank 0 stays if it can. Of
    two nodes this keeps the first, though its own cable may be the broken one: the reports of two
    nodes cannot tell.
    """
    links, stay, left = broken_links(reports), list[str](), list(order)
    while left:
        broken = {name: sum({name, other} in links for other in left) for name in left}
        name = min(left, key=broken.__getitem__)
        stay.append(name)
        left = [other for other in left if other != name and {name, other} not in links]
    return tuple(name for name in order if name not in stay)
