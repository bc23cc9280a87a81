"""A node is heard when its datagram says that it hears us too: a path that works one way only counts as none.

Each agent sends each other one a small datagram several times in a keep-alive, to the address where its workers and stores are reached, and counts what comes back; one that is heard
again after a silence is answered at once. It does not judge: `reach` and the group do. A stranger who knows a node's name could pretend to be it, which keeps a lost path from being noticed and does nothing else.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from elastic.rendezvous.group import Node
from elastic.system.untrusted import parse_json

LIMIT_BYTES = 1024
FRESH_CALLS = 4  # so many that do not come mean that it is not heard


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`hears`: whether the caller hears whom it calls."""

    caller: str
    called: str
    hears: bool

    def to_json(self) -> bytes:
        return json.dumps({"from": self.caller, "to": self.called, "hears": self.hears}).encode()

    @staticmethod
    def parse(data: bytes) -> "Call | None":
        """None for what is no call; anybody can send a datagram."""
        try:
            said = parse_json(data)
        except ValueError:
            return None
        if not isinstance(said, dict) or set(said) != {"from", "to", "hears"}:
            return None
        if not isinstance(said["from"], str) or not isinstance(said["to"], str):
            return None
        return Call(caller=said["from"], called=said["to"], hears=said["hears"] is True)


class Calls:
    """Calls and listens on a thread of its own from the moment it is made; `port` is where."""

    def __init__(self, node_id: str, address: str, every_s: float) -> None:
        """Raises OSError when no socket can be had."""
        self._node_id = node_id
        self._every_s = every_s
        self._socket = _bound(address)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[str, int]] = {}
        self._heard_s: dict[str, float] = {}
        self._counters: dict[str, int] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="rendezvous-calls", daemon=True)
        self._thread.start()

    def know(self, nodes: Iterable[Node]) -> None:
        """Call these from now on, and nobody else; those without a port are left out."""
        peers = {n.id: (n.address, n.port) for n in nodes if n.port and n.id != self._node_id}
        with self._lock:
            self._peers = peers
            self._heard_s = {name: at for name, at in self._heard_s.items() if name in peers}
            self._counters = {name: count for name, count in self._counters.items() if name in peers}

    @property
    def counters(self) -> dict[str, int]:
        """Of each node that was heard both ways: how often."""
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        self._is_over = True
        # It may sleep for a long while until the next call is due.
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._is_over:
            now_s = time.monotonic()
            if now_s >= due_s:
                self._call_all(now_s)
                due_s = now_s + self._every_s
            self._socket.settimeout(max(0.001, due_s - now_s))
            # A datagram that was refused comes back as an error of the next call.
            with contextlib.suppress(OSError):
                self._hear(self._socket.recv(LIMIT_BYTES))

    def _call_all(self, now_s: float) -> None:
        with self._lock:
            peers, heard_s = self._peers, dict(self._heard_s)
        for name, where in peers.items():
            self._call(name, where, hears=self._is_fresh(heard_s.get(name), now_s))

    def _call(self, name: str, where: tuple[str, int], *, hears: bool) -> None:
        # No route, no such host, a full buffer: whoever is not called finds out.
        with contextlib.suppress(OSError):
            self._socket.sendto(Call(caller=self._node_id, called=name, hears=hears).to_json(), where)

    def _is_fresh(self, heard_s: float | None, now_s: float) -> bool:
        return heard_s is not None and now_s - heard_s < FRESH_CALLS * self._every_s

    def _hear(self, data: bytes) -> None:
        call, now_s = Call.parse(data), time.monotonic()
        if call is None or call.called != self._node_id:
            return
        with self._lock:
            where = self._peers.get(call.caller)
            if where is None:
                return
            was_heard = self._is_fresh(self._heard_s.get(call.caller), now_s)
            self._heard_s[call.caller] = now_s
        if not was_heard:
            # Before it counts here: who takes back a complaint must not be complained of by one that waits for the next regular call.
            self._call(call.caller, where, hears=True)
        with self._lock:
            if call.hears and call.caller in self._peers:
                self._counters[call.caller] = self._counters.get(call.caller, 0) + 1


def _bound(address: str) -> socket.socket:
    """On the address that others use, where it is this machine's own; behind a translation of addresses it is not."""
    family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
    made = socket.socket(family, socket.SOCK_DGRAM)
    try:
        try:
            made.bind(where)
        except OSError:
            made.bind(("", 0))
    except BaseException:
        made.close()
        raise
    return made
