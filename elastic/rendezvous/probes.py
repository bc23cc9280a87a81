"""A peer counts as reachable only by probes that say that ours reach it: both directions must work.

Each agent sends every other agent a small datagram several times in a keep-alive, to the address
at which workers and stores are reached, and counts what comes back. Each probe says whether its
sender receives the receiver's probes (the "I hear you" bit of bidirectional forwarding detection,
RFC 5880). A collective needs both directions, so a path that works in one only counts as none.

Datagrams, because a lost one is lost and nothing waits for it. A connection would sit in the
kernel's retransmission for as long as the network is cut, and for a while after.

It does not judge: `partition_detector` and the group do. A stranger who knows a node's id can send
probes in its name. That hides a broken path. Where a firewall passes the stranger's datagrams and
drops those between nodes, it makes nodes look cut off that are not, and they are excluded.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.rendezvous.group import Node
from elastic.system.addresses import listen_on
from elastic.system.clock import Clock
from elastic.system.untrusted import decode, encode

LIMIT_BYTES = 1024
MAX_MISSED_PROBES = 4  # a peer is unreachable after this many


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`hears`: whether the sender receives the probes of `receiver`."""

    sender: str = field(metadata={"key": "from"})
    receiver: str = field(metadata={"key": "to"})
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


class Probes:
    """Sends and receives probes on a thread of its own, from construction to `close`."""

    def __init__(self, node_id: str, address: str, every_s: float, clock: Clock) -> None:
        """Receive on a free `port` of `address`. Raises OSError."""
        self._node_id = node_id
        self._every_s = every_s
        self._clock = clock
        self._socket = listen_on(address, kind=socket.SOCK_DGRAM)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[str, int]] = {}
        self._heard_s: dict[str, float] = {}
        self._counters: dict[str, int] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="rendezvous-probes", daemon=True)
        self._thread.start()

    def set_peers(self, nodes: Iterable[Node]) -> None:
        """Probe these nodes from now on, and no others; nodes without a port are left out."""
        peers = {n.id: (n.address, n.port) for n in nodes if n.port and n.id != self._node_id}
        with self._lock:
            self._peers = peers
            self._heard_s = {name: at for name, at in self._heard_s.items() if name in peers}
            self._counters = {name: count for name, count in self._counters.items() if name in peers}

    @property
    def counters(self) -> dict[str, int]:
        """By node id, how many of its probes arrived that said that ours arrive there."""
        with self._lock:
            return dict(self._counters)

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
                self._send_all(now_s)
                due_s = now_s + self._every_s
            self._socket.settimeout(max(0.001, due_s - now_s))
            # The kernel reports a datagram that a host refused (ICMP) as an error of a later call.
            with contextlib.suppress(OSError):
                self._receive(self._socket.recv(LIMIT_BYTES))

    def _send_all(self, now_s: float) -> None:
        with self._lock:
            peers, heard_s = self._peers, dict(self._heard_s)
        for name, where in peers.items():
            self._send(name, where, hears=self._is_recent(heard_s.get(name), now_s))

    def _send(self, name: str, where: tuple[str, int], *, hears: bool) -> None:
        # No route, no such host, a full buffer: to the peer this is one more missed probe.
        with contextlib.suppress(OSError):
            self._socket.sendto(Probe(sender=self._node_id, receiver=name, hears=hears).to_json(), where)

    def _is_recent(self, heard_s: float | None, now_s: float) -> bool:
        return heard_s is not None and now_s - heard_s < MAX_MISSED_PROBES * self._every_s

    def _receive(self, data: bytes) -> None:
        probe, now_s = Probe.parse(data), self._clock.monotonic()
        if probe is None or probe.receiver != self._node_id:
            return
        with self._lock:
            where = self._peers.get(probe.sender)
            if where is None:
                return
            was_heard = self._is_recent(self._heard_s.get(probe.sender), now_s)
            self._heard_s[probe.sender] = now_s
        if not was_heard:
            # Reply before counting the probe. Otherwise we withdraw our report while the peer,
            # still waiting for our next regular probe, files one against us.
            self._send(probe.sender, where, hears=True)
        with self._lock:
            if probe.hears and probe.sender in self._peers:
                self._counters[probe.sender] = self._counters.get(probe.sender, 0) + 1
