"""A peer counts as reachable only by probes that say that ours reach it: both directions must work.

Each probe says whether its sender receives the receiver's probes (the "I hear you" bit of
bidirectional forwarding detection, RFC 5880). A collective needs both directions, so a path that
works in one only counts as none.

This is the part without a socket: what to send and when, and what follows from a datagram.
`probes` sends and receives. It does not judge: `partition_detector` and the group do.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from elastic.rendezvous.group import Node
from elastic.system.untrusted import decode, encode

MAX_MISSED_PROBES = 4  # a peer is unreachable after this many
# With eight probes in a keep-alive of 2 s, and an answer to each of two that ask, a node sends 50
# datagrams a second at most, however many nodes there are; twice as many while it is not heard.
PEERS_AT_FULL_RATE = 10

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """hears: whether the sender receives the probes of `receiver`. asks: for an answer at once."""

    sender: str
    receiver: str
    hears: bool
    asks: bool = False

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
    """One node's probes. `counters`: by node id, how many arrived that said that ours arrive there.

    interval_s: from one probe of a peer to the next; longer than `every_s` where peers are many.
    """

    def __init__(self, node_id: str, every_s: float) -> None:
        self.counters: dict[str, int] = {}
        self.interval_s = every_s
        self._node_id = node_id
        self._every_s = every_s
        self._peers: dict[str, Address] = {}
        self._asked: dict[str, Address] = {}
        self._known: dict[str, Address] = {}
        self._heard_s: dict[str, float] = {}

    def set_peers(self, nodes: Iterable[Node], asked: Iterable[Node], known: Iterable[Node]) -> None:
        """Probe these nodes from now on, and no others; nodes without a port are left out.

        nodes: those that probe this one as well. asked: those that do not, and are to answer each
        probe. known: those that are answered when they ask.
        """
        self._peers, self._asked = self._addresses(nodes), self._addresses(asked)
        self._known = self._addresses(known) | self._asked | self._peers
        watched = self._peers.keys() | self._asked.keys()
        self._heard_s = {name: at for name, at in self._heard_s.items() if name in watched}
        self.counters = {name: count for name, count in self.counters.items() if name in watched}
        self.interval_s = self._every_s * max(1.0, len(watched) / PEERS_AT_FULL_RATE)

    def _addresses(self, nodes: Iterable[Node]) -> dict[str, Address]:
        return {
            node.id: (node.address, node.port) for node in nodes if node.port and node.id != self._node_id
        }

    def due(self, now_s: float) -> list[tuple[Probe, Address]]:
        """What to send once in every `interval_s`."""
        # A peer that was not heard of late is asked as well: it may know of this node, but not yet
        # that the two are peers, because it stops its workers or saves and does not read the group.
        heard = {name for name in self._heard_s if self._is_recent(name, now_s)}
        return [
            (self._probe(name, hears=name in heard, asks=name in self._asked or name not in heard), where)
            for name, where in (self._peers | self._asked).items()
        ]

    def answer(self, probe: Probe, now_s: float) -> tuple[Probe, Address] | None:
        """A probe has arrived: the answer to send, before it is counted.

        Were it counted first, this node would withdraw its report while the peer, which waits for
        our next regular probe, files one against us.
        """
        where = self._known.get(probe.sender)
        if probe.receiver != self._node_id or where is None:
            return None
        ends_silence = self._is_watched(probe.sender) and not self._is_recent(probe.sender, now_s)
        if self._is_watched(probe.sender):
            self._heard_s[probe.sender] = now_s
        return (self._probe(probe.sender, hears=True), where) if probe.asks or ends_silence else None

    def count(self, probe: Probe) -> None:
        if probe.receiver == self._node_id and probe.hears and self._is_watched(probe.sender):
            self.counters[probe.sender] = self.counters.get(probe.sender, 0) + 1

    def _probe(self, name: str, *, hears: bool, asks: bool = False) -> Probe:
        return Probe(sender=self._node_id, receiver=name, hears=hears, asks=asks)

    def _is_watched(self, name: str) -> bool:
        return name in self._peers or name in self._asked

    def _is_recent(self, name: str, now_s: float) -> bool:
        heard_s = self._heard_s.get(name)
        return heard_s is not None and now_s - heard_s < MAX_MISSED_PROBES * self.interval_s
