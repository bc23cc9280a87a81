"""From the same reports all nodes compute the same nodes to exclude, of which none could stay.

Nodes can meet through a folder, or through servers, that all of them reach while the network
between the nodes themselves is broken. Then every heartbeat goes on and every collective stands
still. Some nodes must go so that the others can train, and all nodes must agree which. They do so
without a further message: each applies this function to the reports in the group. Two nodes that
take other nodes for alive may differ for a moment; compare-and-set lets one of them form.

It does not promise that no smaller set would do, nor that the nodes that stay keep reaching each
other.
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

    Links are edges of a graph, and the excluded nodes are a vertex cover of the broken ones: each
    broken link loses at least one end. The smallest cover is NP-hard to find, so this takes the
    usual greedy one: exclude the node with the most broken links, then look again. That finds the
    one node with the broken cable, because it is an end of every broken link. Among nodes with
    equally many broken links the last in `order` goes, so that rank 0 stays if it can. Of two nodes
    this keeps the first, though its own cable may be the broken one: the reports of two nodes
    cannot tell.
    """
    links = {pair for pair in broken_links(reports) if pair <= set(order)}
    excluded: set[str] = set()
    while left := [pair for pair in links if not pair & excluded]:
        counts = {name: sum(name in pair for pair in left) for name in order}
        excluded.add(max(reversed(order), key=lambda name: counts[name]))
    # The greedy choice may exclude too many: a node that went early may have lost all its broken
    # links to nodes that went later. Put back every node that has no broken link to a node that
    # stays.
    for name in order:
        if name in excluded and not any(name in pair and not (pair - {name}) <= excluded for pair in links):
            excluded.discard(name)
    return tuple(name for name in order if name in excluded)
