"""Reachability probes travel as datagrams over the network that workers use.

Each agent sends its peers a small datagram several times in a keep-alive, to the address at which
workers and stores are reached. `probe_graph` says which nodes are peers, and `probe_exchange` what
a datagram says and what follows from one.

Datagrams, because a lost one is lost and nothing waits for it. A connection would sit in the
kernel's retransmission for as long as the network is cut, and for a while after.

A stranger who knows a node's id can send probes in its name. That hides a broken path. Where a
firewall passes the stranger's datagrams and drops those between nodes, it makes nodes look cut off
that are not, and they are excluded. An answer goes to the address that the group has for the node,
never to the sender of a datagram.
"""

import contextlib
import socket
import threading
from collections.abc import Iterable

from elastic.rendezvous.group import Node
from elastic.rendezvous.probe_exchange import Address, Probe, ProbeExchange
from elastic.system.addresses import listen_on
from elastic.system.clock import Clock

LIMIT_BYTES = 1024


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

    def set_peers(
        self, nodes: Iterable[Node], *, asked: Iterable[Node] = (), known: Iterable[Node] = ()
    ) -> None:
        """Probe `nodes` and `asked` from now on, and answer `known`; see ProbeExchange."""
        with self._lock:
            self._exchange.set_peers(nodes, asked, known)

    @property
    def counters(self) -> dict[str, int]:
        """By node id, how many of its probes arrived that said that ours arrive there."""
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
            answer = self._exchange.answer(probe, self._clock.monotonic())
        if answer is not None:
            self._send(*answer)
        with self._lock:
            self._exchange.count(probe)
