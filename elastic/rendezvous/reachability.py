"""A live node that its peers cannot reach is excluded, and admitted again once they reach it.

A node is live while its heartbeats arrive where the group's state is kept. It is reachable while
probes between it and this node pass in both directions over the network that workers use. Two rules
keep the detector from doing harm:

A node is reported unreachable later (1.5 keep-alive periods of silence) than it is taken for dead
(one). So a node that simply died is evicted first, and nothing about a partition is ever reported.
In a wide group a node watches few others all the time. It reports one only where it has once seen
its heartbeats change.

Where no probe has ever come through, nothing is known and nothing is reported. A firewall may drop
UDP and pass TCP: then this protection is lost, and nothing else.

Each probe says whether its sender receives the receiver's probes (the "I hear you" bit of
bidirectional forwarding detection, RFC 5880). A collective needs both directions, so a path that
works in one only counts as none. Probes are datagrams, because a lost one is lost and nothing waits
for it. A connection would sit in the kernel's retransmission for as long as the network is cut, and
for a while after.

A stranger who knows a node's id can send probes in its name. That hides a broken path. Where a
firewall passes the stranger's datagrams and drops those between nodes, it makes nodes look cut off
that are not, and they are excluded. An answer goes to the address that the group has for the node,
never to the sender of a datagram.

It does not promise that a path which carries probes carries everything: it may drop large packets.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elastic.rendezvous import membership, transitions
from elastic.rendezvous.failure_detector import NO_HEARTBEAT, FailureDetector
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.partition import SETTLED_AFTER, UNREACHABLE_AFTER, probe_graph
from elastic.system.addresses import listen_on
from elastic.system.clock import Clock
from elastic.system.untrusted import decode, encode

REACHABLE_WITHIN = 0.5  # of a keep-alive, since the newest probe
MAX_MISSED_PROBES = 4  # a peer does not hear this node after so many
# With eight probes in a keep-alive of 2 s, and answers to those that ask, a node sends 50 datagrams
# a second at most, however many nodes there are; twice as many while it is not heard.
PEERS_AT_FULL_RATE = 10
LIMIT_BYTES = 1024

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """hears: whether the sender receives the probes of `receiver`, which else answers at once."""

    sender: str
    receiver: str
    hears: bool

    def to_json(self) -> bytes:
        return json.dumps(encode(self)).encode()

    @staticmethod
    def parse(data: bytes) -> "Probe | None":
        """None for anything else: every host can send a datagram to this port."""
        try:
            return decode(Probe, data, what="a probe")
        except ValueError:
            return None


class ProbeExchange:
    """What one node sends, and what follows from a datagram; `Probes` has the socket.

    `counters`: by node id, how many probes arrived that said that ours arrive there. interval_s:
    from one probe of a peer to the next; longer than `every_s` where peers are many.
    """

    def __init__(self, node_id: str, every_s: float) -> None:
        self.counters: dict[str, int] = {}
        self.interval_s = every_s
        self._node_id = node_id
        self._every_s = every_s
        self._peers: dict[str, Address] = {}
        self._known: dict[str, Address] = {}
        self._heard_s: dict[str, float] = {}

    def set_peers(self, nodes: Iterable[Node], known: Iterable[Node] = ()) -> None:
        """Probe these nodes from now on, and no others; nodes without a port are left out.

        known: those that are answered, beside the peers. A node that stops its
        workers or saves does not read the group, and may not know yet that another is its peer.
        """
        self._peers = self._addresses(nodes)
        self._known = self._addresses(known) | self._peers
        self._heard_s = {name: at for name, at in self._heard_s.items() if name in self._peers}
        self.counters = {name: count for name, count in self.counters.items() if name in self._peers}
        self.interval_s = self._every_s * max(1.0, len(self._peers) / PEERS_AT_FULL_RATE)

    def _addresses(self, nodes: Iterable[Node]) -> dict[str, Address]:
        others = (node for node in nodes if node.port and node.id != self._node_id)
        return {node.id: (node.address, node.port) for node in others}

    def due(self, now_s: float) -> list[tuple[Probe, Address]]:
        """What to send once in every `interval_s`; a peer not heard lately is asked to answer."""
        return [
            (self._probe(name, hears=self._is_recent(name, now_s)), where)
            for name, where in self._peers.items()
        ]

    def receive(self, probe: Probe, now_s: float) -> tuple[Probe, Address] | None:
        """A probe has arrived: what to send at once."""
        where = self._known.get(probe.sender)
        if probe.receiver != self._node_id or where is None:
            return None
        if probe.sender in self._peers:
            self._heard_s[probe.sender] = now_s
            if probe.hears:
                self.counters[probe.sender] = self.counters.get(probe.sender, 0) + 1
        return None if probe.hears else (self._probe(probe.sender, hears=True), where)

    def _probe(self, name: str, *, hears: bool) -> Probe:
        return Probe(sender=self._node_id, receiver=name, hears=hears)

    def _is_recent(self, name: str, now_s: float) -> bool:
        heard_s = self._heard_s.get(name)
        return heard_s is not None and now_s - heard_s < MAX_MISSED_PROBES * self.interval_s


class Probes:
    """Sends and receives probes on a thread of its own, from construction to `close`."""

    def __init__(self, node_id: str, address: str, every_s: float, clock: Clock) -> None:
        """Receive on a free `port` of `address`. Raises OSError."""
        self._exchange = ProbeExchange(node_id, every_s)
        self._clock = clock
        self._socket = listen_on(address, kind=socket.SOCK_DGRAM)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="rendezvous-probes", daemon=True)
        self._thread.start()

    def set_peers(self, nodes: Iterable[Node], known: Iterable[Node] = ()) -> None:
        with self._lock:
            self._exchange.set_peers(nodes, known)

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._exchange.counters)

    def close(self) -> None:
        self._is_over = True
        # A datagram to itself wakes the thread, which may sleep until the next probe is due.
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        due_s = self._clock.monotonic()
        while not self._is_over:
            now_s = self._clock.monotonic()
            if now_s >= due_s:
                with self._lock:
                    due, due_s = self._exchange.due(now_s), now_s + self._exchange.interval_s
                for probe, where in due:
                    self._send(probe, where)
            self._socket.settimeout(max(0.001, due_s - now_s))
            # The kernel reports a datagram that a host refused (ICMP) as an error of a later call.
            with contextlib.suppress(OSError):
                self._receive(self._socket.recv(LIMIT_BYTES))

    def _send(self, probe: Probe, where: Address) -> None:
        # No route, no such host, a name that no host can have (TypeError), a full buffer: to the
        # peer this is one more missed probe.
        with contextlib.suppress(OSError, TypeError):
            self._socket.sendto(probe.to_json(), where)

    def _receive(self, data: bytes) -> None:
        probe = Probe.parse(data)
        if probe is None:
            return
        with self._lock:
            answer = self._exchange.receive(probe, self._clock.monotonic())
        if answer is not None:
            self._send(*answer)


class PartitionDetector:
    """One node's reports of the peers that it cannot reach. It judges; `Probes` only counts."""

    def __init__(self, probes: Probes | ProbeExchange, me: str, keep_alive_s: float) -> None:
        self._probes = probes
        self._me = me
        self._keep_alive_s = keep_alive_s
        self._detector = FailureDetector(keep_alive_s=keep_alive_s * UNREACHABLE_AFTER)
        self._partitioned_s: float | None = None
        self._group = Group()
        self._nodes: Mapping[str, Node] = {}  # all that the group names and that take probes
        self._peers = frozenset[str]()

    def observe(self, group: Group, *, now_s: float) -> None:
        """One poll of the probes; the nodes of `group` are probed from now on."""
        counters = self._probes.counters
        if group is not self._group:
            self._set_peers(group)
        # An excluded node is neither a member nor waiting until it has stopped its workers. If its
        # silence were forgotten meanwhile, it would look new, hence reachable, when it waits again.
        remembered = self._detector.nodes.keys() & self._reported(group)
        self._detector = self._detector.observe(
            {name: counters.get(name, NO_HEARTBEAT) for name in self._peers | remembered}, now_s=now_s
        )

    def _set_peers(self, group: Group) -> None:
        """Members probe each other, so that all parts of a cut group are known; and nodes that wait
        are probed as well, so that those that are cut off are known to be.
        """
        self._group = group
        named = (*group.members, *group.waiting)
        self._nodes = {node.id: node for node in named if node.port and node.id != self._me}
        graphs = probe_graph(group.member_ids), probe_graph(group.member_ids | group.waiting_ids)
        self._peers = frozenset[str]().union(*(graph.get(self._me, ()) for graph in graphs))
        self._peers &= self._nodes.keys()
        self._probes.set_peers([self._nodes[name] for name in self._peers], self._nodes.values())

    def _reported(self, group: Group) -> tuple[str, ...]:
        return next((report.peers for report in group.reports if report.node == self._me), ())

    @property
    def suspects(self) -> bool:
        """Whether a node answers no probes that answered before, or while others answer."""
        limit_s = self._keep_alive_s * REACHABLE_WITHIN
        silent = [node.counter for node in self._detector.nodes.values() if node.silence_s > limit_s]
        is_any_reachable = len(silent) < len(self._detector.nodes)
        return any(is_any_reachable or counter != NO_HEARTBEAT for counter in silent)

    def with_own_report(
        self, group: Group, *, alive: AbstractSet[str], moving: AbstractSet[str], now_s: float, step: int = 0
    ) -> Group:
        """The group with this node's report brought up to date; a member also closes a generation
        whose members stay partitioned for a while. moving: whose heartbeats arrive.

        The wait of a quarter of a keep-alive lets the others' reports arrive. All nodes that lost
        the same link notice it within one interval of the probes. If the generation closed on the
        first report, a pair would be all that is known, and of a pair the later node goes, even
        when the earlier one has lost its links to everyone.
        """
        reported = self._reported(group)
        peers, updated = self._unreachable(reported, alive, moving), group
        if peers != reported:
            updated = transitions.report_unreachable(group, node_id=self._me, peers=peers)
        if self._me not in group.member_ids or not membership.is_partitioned(group, alive=alive):
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
        reachable = {i for i, p in nodes if p.counter != NO_HEARTBEAT and p.silence_s <= limit_s}
        # A node that was never reachable may be behind a firewall that drops all probes. That is
        # ruled out once it was reachable before, or while any other node is reachable now.
        judged = {name for name, node in nodes if reachable or node.counter != NO_HEARTBEAT}
        silent = judged - self._detector.alive
        # Hysteresis: a report begins after 1.5 keep-alive periods of silence and ends only when a
        # probe came within the last half. A link that loses many packets would otherwise end one
        # generation after the other. A node that is in no list stops its workers; its place in the
        # report stays. A link that is not probed any more has no place: its own report has the
        # link.
        gone = set(reported) - self._nodes.keys()
        kept = (silent & self._peers & moving) | (set(reported) & (self._peers | gone) & alive - reachable)
        return tuple(name for name in dict.fromkeys((*self._nodes, *reported)) if name in kept)
