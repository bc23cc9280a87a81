"""In a wide group each node watches the few that follow it in a ring, until one of them is silent.

If each node read the heartbeats of all others, a group of N nodes would read N² all the time. Up to
ALL_WATCH_ALL nodes do so. In a larger group each reads those of the next WATCHED nodes in the ring
that `probe_graph.place` orders, so each node is watched by as many, wherever it stands in rank
order. A node that finds one of them silent watches all nodes until none is. A death is then found
after one keep-alive, as in a small group, unless all that watch a node die with it: then the nodes
that watch those find it, half a keep-alive later.

Nothing here observes: `GroupObserver` does. A node that is not watched is presumed alive.
"""

from bisect import bisect_right
from functools import lru_cache

from elastic.rendezvous.probe_graph import place

ALL_WATCH_ALL = 16
WATCHED = 4
# In keep-alive periods: of silence, from which on it watches all; and for how long after.
SUSPECTED_AFTER = 0.5
WATCHES_ALL_FOR = 2.0


def watched_by(me: str, nodes: frozenset[str]) -> frozenset[str]:
    """nodes: all that the group names, with `me` or without it."""
    others = nodes - {me}
    if len(others) < ALL_WATCH_ALL:
        return others
    ring = _ring(others | {me})
    after = bisect_right(ring, place(me), key=place)
    return frozenset(ring[(after + step) % len(ring)] for step in range(WATCHED)) - {me}


@lru_cache(maxsize=8)
def _ring(nodes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(nodes, key=place))
