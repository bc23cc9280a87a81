"""Versions never step back, although one agent keeps the state in its memory and may lose it.

`--rdzv-backend c10d`: the agent on the machine that has the endpoint's address serves a small
store, which answers one JSON line with another. When that agent dies, the store is gone, and when
an agent runs there again, it is empty. Each node remembers the newest value that it has seen, and
puts it back where it finds an older one or none. Of two histories that meet, the later generation
wins, then the higher version, then the greater name of a write; so no version is given out twice.

While no agent serves the store, no node can join or leave. It does not promise that only nodes of
the run reach the port: see docs/security.md.
"""

import contextlib
import ipaddress
import json
import socket
import socketserver
import threading
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from elastic.rendezvous.backends.backend import VALUE_LIMIT_BYTES, BackendFailed, generation_of
from elastic.system.addresses import listen_on, split_endpoint
from elastic.system.clock import SystemClock
from elastic.system.untrusted import bounds, decode, encode

DEFAULT_PORT = 29400  # torchrun's
CONNECT_S, ANSWER_S = 0.5, 1.0
RETRY_S = 0.5  # polls come many times a second, and each would wait for the host again
LINE_LIMIT_BYTES = 2 * VALUE_LIMIT_BYTES
VERSIONS_PER_GENERATION = 2**32

Version = Annotated[int, bounds(lowest=0, below=2**62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One version of the group. writer: new for each write, by which a node knows its own."""

    version: Version = 0
    writer: str = ""
    value: str = ""

    @property
    def order(self) -> tuple[int, str]:
        return self.version, self.writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`op`: state, put or get; with the fields of it.

    state: `seen` is put back if it has its value and is greater than the present one; then `new`
    replaces `expected`. put: `text` is that of the node `name` from now on. get: the texts of the
    nodes `names`, None: of all.
    """

    op: str
    group: str
    seen: Entry = Entry()
    expected: Entry = Entry()
    new: Entry | None = None
    name: str = ""
    names: tuple[str, ...] | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """newest: without its value where it is `seen`. texts: by node."""

    newest: Entry = Entry()
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class GroupInMemory:
    newest: Entry = field(default_factory=Entry)
    texts: dict[str, str] = field(default_factory=dict)

    def answer(self, asked: Question) -> Answer:
        match asked.op:
            case "state":
                if asked.seen.value and asked.seen.order > self.newest.order:
                    self.newest = asked.seen
                if asked.new is not None and asked.expected.order == self.newest.order:
                    self.newest = asked.new
                is_known = self.newest.order == asked.seen.order
                return Answer(newest=replace(self.newest, value="") if is_known else self.newest)
            case "put":
                self.texts[asked.name] = asked.text
                return Answer()
            case "get":
                names = tuple(self.texts) if asked.names is None else asked.names
                return Answer(texts={name: self.texts[name] for name in names if name in self.texts})
            case other:
                raise ValueError(f"expected a question, found {other:.40}")


class _Server(socketserver.ThreadingTCPServer):
    """The groups in this process's memory, for as long as it lives."""

    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(("", 0), _Connection, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.lock = threading.Lock()
        self.groups: dict[str, GroupInMemory] = {}
        threading.Thread(target=self.serve_forever, name="rendezvous-host", daemon=True).start()

    def answer(self, line: bytes) -> bytes:
        asked = decode(Question, line, what="question")
        with self.lock:
            answer = self.groups.setdefault(asked.group, GroupInMemory()).answer(asked)
            return json.dumps(encode(answer)).encode() + b"\n"

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that breaks, or has no thread to serve it, ends alone."""


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        while line := self.rfile.readline(LINE_LIMIT_BYTES):
            self.wfile.write(self.server.answer(line))


class HostBackend:
    def __init__(self, endpoint: str, group: str) -> None:
        """`endpoint`: `HOST[:PORT]`. `group`: any text. Raises UsageError."""
        host, self._port = split_endpoint(endpoint, DEFAULT_PORT)
        self._host, self._group = host.strip("[]"), group
        self._clock = SystemClock()
        self._lock = threading.RLock()
        self._server: _Server | None = None
        self._socket: socket.socket | None = None
        self._retry_s, self._reason = float("-inf"), ""
        self._seen = Entry()

    @property
    def is_host(self) -> bool:
        """Whether the store is served by this process."""
        return self._server is not None

    def read(self) -> tuple[int, bytes] | None:
        with self._lock:
            newest = self._ask("state", seen=replace(self._seen, value="")).newest
            if newest.order < self._seen.order:  # the store was lost
                newest = self._ask("state", seen=self._seen).newest
            if newest.order > self._seen.order:
                self._seen = newest
            seen = self._seen
            return (seen.version, seen.value.encode(errors="replace")) if seen.version else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._lock:
            if self._seen.version != (version or 0):
                return False
            # After the store was lost, two histories can meet: that of a survivor, with many
            # versions of few generations, and a new one, with few versions but more generations.
            # The later generation must win. So each begins, with the value that forms it, at a
            # version above all that the one before could reach.
            number = max(version or 0, generation_of(value) * VERSIONS_PER_GENERATION) + 1
            new = Entry(version=number, writer=uuid.uuid4().hex, value=value.decode())
            # If the answer is lost, the write may have won all the same. The next read finds out.
            with contextlib.suppress(BackendFailed):
                expected = replace(self._seen, value="")
                found = self._ask("state", seen=replace(new, value=""), expected=expected, new=new).newest
                if found.order == new.order:
                    self._seen = new
                    return True
            return False

    def show(self, node_id: str, text: str) -> None:
        self._ask("put", name=node_id, text=text)

    def shown(self, node_ids: Collection[str] | None = None) -> dict[str, str]:
        return self._ask("get", names=None if node_ids is None else tuple(sorted(node_ids))).texts

    def _ask(self, op: str, **fields: Any) -> Answer:
        """Raises BackendFailed, within CONNECT_S and ANSWER_S.

        Where no name server answers it takes as long as to look up the name, some 10 s. An agent's
        calls have a thread of their own (agent/group_client.py), and training goes on.
        """
        line = json.dumps(encode(Question(op=op, group=self._group, **fields))).encode() + b"\n"
        with self._lock:
            if self._socket is None and self._clock.monotonic() < self._retry_s:
                raise self._failure()
            try:
                if self._socket is None:
                    self._socket = self._open()
                self._socket.sendall(line)
                with self._socket.makefile("rb") as answers:
                    return decode(Answer, answers.readline(LINE_LIMIT_BYTES), what="answer")
            except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no thread can begin
                if self._socket is not None:  # it may be in the middle of an answer
                    self._socket.close()
                self._socket = None
                self._reason = str(error)[:200] or type(error).__name__
                self._retry_s = self._clock.monotonic() + RETRY_S
                raise self._failure() from error

    def _open(self) -> socket.socket:
        # At each try: the name of a pod may have no address yet when its agent starts.
        if self._server is None and is_own_address(self._host):
            with contextlib.suppress(OSError):  # another process of this machine may serve it
                # A host name often resolves to a loopback address on the host itself, where other
                # machines could not connect: so a name listens on all interfaces.
                self._server = _Server(listen_on(self._host if is_address(self._host) else "", self._port))
        opened = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
        opened.settimeout(ANSWER_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened

    def _failure(self) -> BackendFailed:
        return BackendFailed(
            f"the store at {self._host}:{self._port} should answer within {ANSWER_S:g} s, but did not ({self._reason}); does the agent on"
            f" that host run? This one goes on by itself when it is back"
        )


def is_own_address(host: str) -> bool:
    """Whether `host` names an address of this machine: no other address can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost"
