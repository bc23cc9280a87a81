"""A live node that its peers cannot reach is excluded, and admitted again once they reach it.

A node is live while its heartbeats arrive where the group's state is kept. It is reachable while
probes between it and this node pass in both directions over the network that workers use. Two rules
keep the detector from doing harm:

A node is reported unreachable later (1.5 keep-alive periods of silence) than it is taken for dead
(one). So a node that simply died is evicted first, and nothing about a partition is ever reported.
In a wide group a node watches few others all the time. It reports one only after it has seen its
heartbeats arrive while the probes did not.

Where no probe has ever come through, nothing is known and nothing is reported. A firewall may drop
UDP and pass TCP: then this protection is lost, and nothing else.

It does not promise that a path which carries probes carries everything: it may drop large packets.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from elastic.rendezvous import membership, transitions
from elastic.rendezvous.failure_detector import NO_HEARTBEAT, FailureDetector
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.link_sweep import LinkSweep
from elastic.rendezvous.probe_graph import peers_of, place

# In keep-alive periods.
UNREACHABLE_AFTER = 1.5
SETTLED_AFTER = 0.25
REACHABLE_WITHIN = 0.5
# Nodes that one node probes all the time: those of its place in the graph, and those it reported.
PROBED_AT_MOST = 20
REPORTED_AT_LEAST = 4


class ProbeCounters(Protocol):
    def set_peers(
        self, nodes: Iterable[Node], *, asked: Iterable[Node] = (), known: Iterable[Node] = ()
    ) -> None:
        """Probe these nodes from now on, which probe this one, and no others.

        asked: nodes that are to answer each probe, because they do not probe this one by
        themselves. known: nodes that are answered.
        """

    @property
    def counters(self) -> Mapping[str, int]:
        """By node id, how many of its probes arrived that said that ours arrive there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLinks:
    """Whom one node of a group probes, by id.

    peers: all the time, and they probe this node. reported: those among its own reports that do
    not; a report can end only while its peers are probed. others: the members whose links to this
    one the sweep tries, in the order of the ring: none while this node reports any, so that a
    report does not grow with the group. nodes: all that take probes.
    """

    nodes: Mapping[str, Node]
    peers: frozenset[str]
    reported: tuple[str, ...]
    others: tuple[str, ...]

    @staticmethod
    def of(group: Group, me: str) -> "OwnLinks":
        nodes = {node.id: node for node in (*group.members, *group.waiting) if node.port and node.id != me}
        members = tuple(node.id for node in group.members)
        newcomers = tuple(node.id for node in group.waiting if node.id not in group.member_ids)
        peers = peers_of(me, members, newcomers) & nodes.keys()
        room = max(REPORTED_AT_LEAST, PROBED_AT_MOST - len(peers))
        own = own_report(group, me)
        reported = [name for name in own if name in nodes and name not in peers]
        is_swept = me in members and not own
        others = [name for name in members if is_swept and name in nodes and name not in peers]
        return OwnLinks(
            nodes=nodes, peers=peers, reported=tuple(reported[:room]), others=tuple(sorted(others, key=place))
        )


def own_report(group: Group, me: str) -> tuple[str, ...]:
    """The nodes that `me` has reported unreachable."""
    return next((report.peers for report in group.reports if report.node == me), ())


class PartitionDetector:
    def __init__(self, probes: ProbeCounters, me: str, keep_alive_s: float) -> None:
        self._probes = probes
        self._me = me
        self._keep_alive_s = keep_alive_s
        self._detector = FailureDetector(keep_alive_s=keep_alive_s * UNREACHABLE_AFTER)
        self._sweep = LinkSweep(me, keep_alive_s)
        self._partitioned_s: float | None = None
        self._group = Group()
        self._links = OwnLinks.of(Group(), me)
        self._watched = frozenset[str]()

    def observe(self, group: Group, *, now_s: float) -> None:
        """One poll of the probes; the nodes of `group` are probed from now on."""
        counters = self._probes.counters
        self._set_peers(group, counters.keys(), now_s)
        # An excluded node is neither a member nor waiting until it has stopped its workers. If its
        # silence were forgotten meanwhile, it would look new, hence reachable, when it waits again.
        # The silence of a node that only others have reported says nothing: it is not probed, and
        # would be reported as soon as it is.
        remembered = self._detector.nodes.keys() & own_report(group, self._me)
        self._detector = self._detector.observe(
            {name: counters.get(name, NO_HEARTBEAT) for name in self._watched | remembered}, now_s=now_s
        )
        if not group.open:
            self._partitioned_s = None

    def _set_peers(self, group: Group, answered: AbstractSet[str], now_s: float) -> None:
        is_new = group is not self._group
        if is_new:
            self._group, self._links = group, OwnLinks.of(group, self._me)
        links, before = self._links, self._sweep.asked
        self._sweep.advance(links.others, answered, now_s=now_s)
        if is_new or self._sweep.asked != before:
            asked = (*links.reported, *self._sweep.asked)
            self._watched = links.peers.union(asked)
            self._probes.set_peers(
                [links.nodes[name] for name in links.peers],
                asked=[links.nodes[name] for name in asked],
                known=links.nodes.values(),
            )

    @property
    def suspects(self) -> bool:
        """Whether a node answers no probes that answered before, or while others answer."""
        limit_s = self._keep_alive_s * REACHABLE_WITHIN
        silent = [node.counter for node in self._detector.nodes.values() if node.silence.seconds > limit_s]
        is_any_reachable = len(silent) < len(self._detector.nodes)
        return any(is_any_reachable or counter != NO_HEARTBEAT for counter in silent)

    def with_own_report(self, group: Group, *, alive: AbstractSet[str], moving: AbstractSet[str]) -> Group:
        """The group with this node's report brought up to date. moving: whose heartbeats arrive."""
        reported = own_report(group, self._me)
        peers = self._unreachable(reported, alive, moving)
        if peers == reported:
            return group
        return transitions.report_unreachable(group, node_id=self._me, peers=peers)

    def with_own_report_or_closed(
        self, group: Group, *, alive: AbstractSet[str], moving: AbstractSet[str], step: int, now_s: float
    ) -> Group:
        """As `with_own_report`; closes a generation whose members stay partitioned for a while.

        The wait of a quarter of a keep-alive lets the others' reports arrive. All nodes that lost
        the same link notice it within one interval of the probes. If the generation closed on the
        first report, a pair would be all that is known, and of a pair the later node goes, even
        when the earlier one has lost its links to everyone.
        """
        updated = self.with_own_report(group, alive=alive, moving=moving)
        if not membership.is_partitioned(group, alive=alive):
            self._partitioned_s = None
            return updated
        if self._partitioned_s is None:
            self._partitioned_s = now_s
        is_settled = now_s - self._partitioned_s >= self._keep_alive_s * SETTLED_AFTER
        return transitions.close_if_partitioned(updated, alive=alive, step=step) if is_settled else updated

    def _unreachable(
        self, reported: tuple[str, ...], alive: AbstractSet[str], moving: AbstractSet[str]
    ) -> tuple[str, ...]:
        """The nodes that this one reports; `reported` are those that it has reported so far."""
        if not reported and self._detector.nodes.keys() <= self._detector.alive:
            return ()
        # The nodes with a recent probe that says that ours arrive.
        limit_s = self._keep_alive_s * REACHABLE_WITHIN
        nodes = self._detector.nodes.items()
        reachable = {i for i, p in nodes if p.counter != NO_HEARTBEAT and p.silence.seconds <= limit_s}
        # A node that was never reachable may be behind a firewall that drops all probes. That is
        # ruled out once it was reachable before, or while any other node is reachable now.
        judged = {name for name, node in nodes if reachable or node.counter != NO_HEARTBEAT}
        silent = judged - self._detector.alive
        # Hysteresis: a report begins after 1.5 keep-alive periods of silence and ends only when a
        # probe came within the last half. A link that loses many packets would otherwise end one
        # generation after the other. A node that is in no list stops its workers; its place in the
        # report stays. One that is not probed any more has no place: its own report has the link.
        gone = set(reported) - self._links.nodes.keys()
        kept = (silent & self._watched & moving) | (
            set(reported) & (self._watched | gone) & alive - reachable
        )
        return tuple(name for name in dict.fromkeys((*self._links.nodes, *reported)) if name in kept)
