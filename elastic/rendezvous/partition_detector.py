"""A node that answers in the group but is out of reach of its peers is set apart, and comes back
once it is heard again.

Silence between two nodes is judged later than silence in the group, so that a node that is simply
gone is evicted and nobody complains. Where calls come through to nobody, as behind a firewall,
nothing is known and nobody complains. It does not promise that a path which carries calls carries
everything.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from elastic.rendezvous import transitions
from elastic.rendezvous.failure_detector import NO_HEARTBEAT, FailureDetector
from elastic.rendezvous.group import Group, Node

UNREACHABLE_AFTER = 1.5  # of a keep-alive
SETTLED_AFTER = 0.25  # of a keep-alive: so long the first report waits for the others'
REACHABLE_WITHIN = 0.5


class ProbeCounters(Protocol):
    def set_peers(self, nodes: Iterable[Node]) -> None: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Of each node that was heard both ways: how often."""


class PartitionDetector:
    def __init__(self, probes: ProbeCounters, keep_alive_s: float) -> None:
        self._probes = probes
        self._keep_alive_s = keep_alive_s
        self._detector = FailureDetector(keep_alive_s=keep_alive_s * UNREACHABLE_AFTER)
        self._partitioned_s: float | None = None

    def observe(self, group: Group, *, now_s: float) -> None:
        """Bring up to date who is heard; `group` says whom to call."""
        nodes = {node.id: node for node in (*group.waiting, *group.members)}
        self._probes.set_peers(nodes.values())
        counters = self._probes.counters
        # One that is set apart leaves the group for a moment, until it has stopped its workers:
        # that is no reason to forget its silence.
        names = {name for name, node in nodes.items() if node.port} | transitions.reported(group)
        self._detector = self._detector.observe(
            {name: counters.get(name, NO_HEARTBEAT) for name in names}, now_s=now_s
        )
        if not group.open:
            self._partitioned_s = None

    def report(self, group: Group, *, me: str, alive: AbstractSet[str]) -> Group:
        """The group after this node has said whom it does not hear now."""
        return transitions.report_unreachable(group, node_id=me, peers=self._unreachable(group, me, alive))

    def report_and_close(
        self, group: Group, *, me: str, alive: AbstractSet[str], step: int, now_s: float
    ) -> Group:
        """The same, and closed once members have complained of each other for so long that all have had time to say it."""
        told = self.report(group, me=me, alive=alive)
        if not transitions.is_partitioned(group, alive=alive):
            self._partitioned_s = None
            return told
        if self._partitioned_s is None:
            self._partitioned_s = now_s
        is_settled = now_s - self._partitioned_s >= self._keep_alive_s * SETTLED_AFTER
        return transitions.close_if_partitioned(told, alive=alive, step=step) if is_settled else told

    def _unreachable(self, group: Group, me: str, alive: AbstractSet[str]) -> tuple[str, ...]:
        before = [name for report in group.reports if report.node == me for name in report.peers]
        known = dict.fromkeys([*(node.id for node in (*group.members, *group.waiting)), *before])
        others = [name for name in known if name != me and name in alive and name in self._detector.nodes]
        heard = self._reachable
        # One that was never heard may have no way for calls at all, unless they come through from
        # elsewhere.
        met = {name for name in others if heard or self._detector.nodes[name].counter != NO_HEARTBEAT}
        silent = met - self._detector.alive
        # Between the two limits a report stands if it was made.
        return tuple(name for name in others if name in silent or (name in before and name not in heard))

    @property
    def _reachable(self) -> frozenset[str]:
        """Those who were heard both ways a moment ago."""
        limit_s = self._keep_alive_s * REACHABLE_WITHIN
        nodes = self._detector.nodes.items()
        return frozenset(i for i, p in nodes if p.counter != NO_HEARTBEAT and p.silence.seconds <= limit_s)
