"""A live node that its peers cannot reach is excluded, and admitted again once they reach it.

A node is live while its heartbeats arrive where the group's state is kept. It is reachable while
probes between it and this node pass in both directions over the network that workers use. Two rules
keep the detector from doing harm:

A node is reported unreachable later (1.5 keep-alive periods of silence) than it is taken for dead
(one). So a node that simply died is evicted first, and nothing about a partition is ever reported.

Where no probe has ever come through, nothing is known and nothing is reported. A firewall may drop
UDP and pass TCP: then this protection is lost, and nothing else.

It does not promise that a path which carries probes carries everything: it may drop large packets.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from elastic.rendezvous import membership, transitions
from elastic.rendezvous.failure_detector import NO_HEARTBEAT, FailureDetector
from elastic.rendezvous.group import Group, Node

# In keep-alive periods.
UNREACHABLE_AFTER = 1.5
SETTLED_AFTER = 0.25
REACHABLE_WITHIN = 0.5


class ProbeCounters(Protocol):
    def set_peers(self, nodes: Iterable[Node]) -> None:
        """Probe these nodes from now on, and no others."""

    @property
    def counters(self) -> Mapping[str, int]:
        """By node id, how many of its probes arrived that said that ours arrive there."""


class PartitionDetector:
    def __init__(self, probes: ProbeCounters, keep_alive_s: float) -> None:
        self._probes = probes
        self._keep_alive_s = keep_alive_s
        self._detector = FailureDetector(keep_alive_s=keep_alive_s * UNREACHABLE_AFTER)
        self._partitioned_s: float | None = None

    def observe(self, group: Group, *, now_s: float) -> None:
        """One poll of the probes; the nodes of `group` are probed from now on."""
        nodes = {node.id: node for node in (*group.waiting, *group.members)}
        self._probes.set_peers(nodes.values())
        counters = self._probes.counters
        # An excluded node is neither a member nor waiting until it has stopped its workers. If its
        # silence were forgotten meanwhile, it would look new, hence reachable, when it waits again.
        names = {name for name, node in nodes.items() if node.port} | membership.reported(group)
        self._detector = self._detector.observe(
            {name: counters.get(name, NO_HEARTBEAT) for name in names}, now_s=now_s
        )
        if not group.open:
            self._partitioned_s = None

    def with_own_report(self, group: Group, *, me: str, alive: AbstractSet[str]) -> Group:
        """The group with this node's report brought up to date."""
        return transitions.report_unreachable(group, node_id=me, peers=self._unreachable(group, me, alive))

    def with_own_report_or_closed(
        self, group: Group, *, me: str, alive: AbstractSet[str], step: int, now_s: float
    ) -> Group:
        """As `with_own_report`; closes a generation whose members stay partitioned for a while.

        The wait of a quarter of a keep-alive lets the others' reports arrive. All nodes that lost
        the same link notice it within one interval of the probes. If the generation closed on the
        first report, a pair would be all that is known, and of a pair the later node goes, even
        when the earlier one has lost its links to everyone.
        """
        updated = self.with_own_report(group, me=me, alive=alive)
        if not membership.is_partitioned(group, alive=alive):
            self._partitioned_s = None
            return updated
        if self._partitioned_s is None:
            self._partitioned_s = now_s
        is_settled = now_s - self._partitioned_s >= self._keep_alive_s * SETTLED_AFTER
        return transitions.close_if_partitioned(updated, alive=alive, step=step) if is_settled else updated

    def _unreachable(self, group: Group, me: str, alive: AbstractSet[str]) -> tuple[str, ...]:
        reported = [name for report in group.reports if report.node == me for name in report.peers]
        known = dict.fromkeys([*(node.id for node in (*group.members, *group.waiting)), *reported])
        others = [name for name in known if name != me and name in alive and name in self._detector.nodes]
        # The nodes with a recent probe that says that ours arrive.
        limit_s = self._keep_alive_s * REACHABLE_WITHIN
        nodes = self._detector.nodes.items()
        reachable = {i for i, p in nodes if p.counter != NO_HEARTBEAT and p.silence.seconds <= limit_s}
        # A node that was never reachable may be behind a firewall that drops all probes. That is
        # ruled out once it was reachable before, or while any other node is reachable now.
        judged = {name for name in others if reachable or self._detector.nodes[name].counter != NO_HEARTBEAT}
        silent = judged - self._detector.alive
        # Hysteresis: a report begins after 1.5 keep-alive periods of silence and ends only when a
        # probe came within the last half. A link that loses many packets would otherwise end one
        # generation after the other.
        return tuple(
            name for name in others if name in silent or (name in reported and name not in reachable)
        )
