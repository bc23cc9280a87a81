"""Who is cut off follows from who does not hear whom, is the same whoever works it out, and is as few as it takes.

Nodes may meet through a folder, or servers, that all of them reach while the network between them is broken_links. It does not promise that those who stay hear each other for long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableReport:
    """`node` and each of `peers` do not hear each other both ways."""

    node: str
    # The rendezvous state calls it so.
    peers: tuple[str, ...] = field(metadata={"key": "unheard"})


def broken_links(reports: Iterable[UnreachableReport]) -> frozenset[frozenset[str]]:
    """The pairs of nodes of which at least one complains of the other."""
    pairs = ((report.node, other) for report in reports for other in report.peers)
    return frozenset(frozenset(pair) for pair in pairs if pair[0] != pair[1])


def nodes_to_exclude(order: Sequence[str], reports: Iterable[UnreachableReport]) -> tuple[str, ...]:
    """Those without whom nobody in `order` has a report about another, in this order.

    Who is part of most reports goes first; of several the last in the order, so that rank 0 stays if it can.
    """
    pairs = {pair for pair in broken_links(reports) if pair <= set(order)}
    gone: set[str] = set()
    while left := [pair for pair in pairs if not pair & gone]:
        counts = {name: sum(name in pair for pair in left) for name in order}
        gone.add(max(reversed(order), key=lambda name: counts[name]))
    # Of two that went for each other's sake one may be fine without the rest.
    for name in order:
        if name in gone and not any(name in pair and not (pair - {name}) <= gone for pair in pairs):
            gone.discard(name)
    return tuple(name for name in order if name in gone)
