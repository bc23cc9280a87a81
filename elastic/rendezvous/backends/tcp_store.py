"""Versions never step back, although one agent keeps the store in its memory and may lose it.

elastic/<group>/group                  "<version> <writer>"
elastic/<group>/value/<writer>         that version's value; older ones are deleted
elastic/<group>/nodes                  the ids of all nodes that ever sent a heartbeat, one a line
elastic/<group>/beat/<node>            the counter of one node
elastic/<group>/requests/<generation>  lines of a JSON list [node, text]; a node's last one counts
elastic/<group>/generation             the newest generation as text

The store does one thing after the other, so what is read often is short: a poll reads the version
alone, and its value only when there is another one.

The store is torch's TCPStore, served by the agent on the machine that has the endpoint's address.
When that agent dies, the store is gone, and when an agent runs there again, it is empty. Each node
remembers the newest value that it has seen. A node that finds an older value than its own in the
store, or none, puts its own back. No version is given out twice, because the version also counts
generations: see `compare_and_set`.

While no agent serves the store, no node can join or leave. It does not promise that only nodes of
the run reach the port: see docs/security.md.
"""

import contextlib
import json
import re
import threading
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public by its documentation

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.tcp_store_client import TcpStoreClient, is_own_address
from elastic.system.addresses import split_endpoint
from elastic.system.clock import SystemClock
from elastic.system.untrusted import decode, parse_json, parse_number

DEFAULT_PORT = 29400  # torchrun's
WRITE_TRIES = 50

# TCPStore has no read that returns at once for an absent key: `get` waits for it. `compare_set`
# with an expected value that no key ever has returns the value, or this expected value for an
# absent key. For one that expects an empty text, an absent key is as good as an empty one.
_ABSENT = "-"
_VERSIONS_PER_GENERATION = 2**32
_WRITER = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StoredVersion:
    """Which version of the group's state is the newest, as the store holds it.

    Of two histories that meet, every node takes the greater one: by its version, then its writer.
    `writer` is new for each write. Two nodes that evict the same dead node write equal bytes for
    the same version: only by the writer does each know whether its own write won.
    """

    version: int
    writer: str

    @property
    def text(self) -> str:
        return f"{self.version} {self.writer}"

    @staticmethod
    def parse(text: str) -> "StoredVersion":
        """Raises BackendFailed."""
        number, _, writer = text.partition(" ")
        version = parse_number(number)
        if version is None or not _WRITER.fullmatch(writer):
            raise BackendFailed(
                f"the store should hold a group as this version of elastic-train writes it, found {text[:40]!r}; does another program use"
                f" that port?"
            )
        return StoredVersion(version=version, writer=writer)


class TcpStoreBackend:
    combines_from = 17

    def __init__(self, endpoint: str, group: str) -> None:
        """`endpoint`: `HOST[:PORT]`. `group`: any text. Raises UsageError."""
        host, port = split_endpoint(endpoint, DEFAULT_PORT)
        host = host.strip("[]")
        self._client = TcpStoreClient(host, port, may_host=partial(is_own_address, host), clock=SystemClock())
        self._prefix = f"elastic/{quote(group, safe='')}/"
        self._lock = threading.Lock()
        self._seen: tuple[StoredVersion, bytes] | None = None
        self._counters: dict[str, int] = {}
        self._listed: dict[str, int] = {}
        self._nodes: frozenset[str] = frozenset()
        self._nodes_of = 0  # the connection over which these were read
        self._requested: int | None = None  # the generation in which this node has left requests
        self._generation = self._written = 0
        self._shown: tuple[int, int] = (0, 0)  # generation, and the connection that showed it

    @property
    def is_host(self) -> bool:
        """Whether the store is served by this process."""
        return self._client.is_host

    def close(self) -> None:
        """Disconnect, and end the store if this process serves it."""
        self._client.close()

    def read(self) -> tuple[int, bytes] | None:
        with self._client.use("read the group's state") as store:
            found = self._refresh(store)
        return None if found is None else (found[0].version, found[1])

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._client.use("read the group's state") as store:
            seen = self._seen
            if seen is None or seen[0].version != version:
                seen = self._refresh(store)
        if version != (None if seen is None else seen[0].version):
            return False
        # After the store was lost, two histories can meet: that of a survivor, with many versions
        # of few generations, and a new one, with few versions but more generations. The later
        # generation must win. So each generation begins, with the value that forms it, at a version
        # above all that the one before could reach.
        lowest = max(self._generation, self._written) * _VERSIONS_PER_GENERATION
        successor = StoredVersion(version=max(version or 0, lowest) + 1, writer=uuid.uuid4().hex)
        expected = "" if seen is None else seen[0].text
        # If the answer is lost, the write may have won all the same. The next read finds out.
        with contextlib.suppress(BackendFailed), self._client.use("write the group's state") as store:
            if self._store_value(store, successor, value, expected) == successor.text:
                self._seen = successor, value
                if seen is not None:
                    store.delete_key(self._value_key(seen[0]))
                return True
            store.delete_key(self._value_key(successor))
        return False

    def write_as_of(self, generation: int) -> None:
        self._written = generation

    def beat(self, node_id: str) -> None:
        with self._lock, self._client.use("write a heartbeat") as store:
            key = self._key(f"beat/{node_id}")
            wanted = self._counters.get(node_id, 0) + 1
            found = store.add(key, 1)
            if found < wanted:  # a new, empty store: a counter that steps back could repeat a value
                found = store.add(key, wanted - found)
            self._counters[node_id] = found
            if self._listed.get(node_id) != self._client.connections:
                store.append(self._key("nodes"), json.dumps(node_id) + "\n")  # type: ignore[attr-defined] # not in its stubs
                self._listed[node_id] = self._client.connections

    def beats(self, node_ids: Collection[str] | None = None) -> dict[str, int]:
        with self._client.use("read heartbeats") as store:
            # `multi_get` waits for absent keys. A node is listed after its first heartbeat, so of
            # the listed ones none is absent. Listed once, it is so for as long as the store lives.
            if self._nodes_of != self._client.connections:
                self._nodes, self._nodes_of = frozenset(), self._client.connections
            if node_ids is None or not self._nodes.issuperset(node_ids):
                self._nodes = _parse_nodes(self._get(store, "nodes"))
            nodes = sorted(self._nodes if node_ids is None else self._nodes.intersection(node_ids))
            values = store.multi_get([self._key(f"beat/{node_id}") for node_id in nodes]) if nodes else []
        beats = zip(nodes, map(parse_number, values), strict=True)
        return {node_id: counter for node_id, counter in beats if counter is not None}

    def request(self, node_id: str, text: str) -> None:
        with self._client.use("write a request") as store:
            self._requested = self._generation
            key, line = self._key(f"requests/{self._generation}"), json.dumps([node_id, text])
            store.append(key, f"{line}\n")  # type: ignore[attr-defined]
            # `append` waits for no answer. A node that has taken a request back relies on it that
            # none finds it later. The store serves a connection in order.
            store.check([key])

    def requests(self) -> dict[str, str]:
        with self._client.use("read requests") as store:
            text = self._get(store, f"requests/{self._generation}")
        found: dict[str, str] = {}
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                node_id, wish = decode(list[str], line, what="a request")
                found[node_id] = wish
        return {node_id: wish for node_id, wish in found.items() if wish}

    def publish_generation(self, generation: int) -> None:
        self._generation = max(self._generation, generation)
        if self._requested is not None and self._requested < self._generation:
            # They are answered, or void. Each node that has left some deletes them all, so that
            # none comes back by one that was slow.
            with self._client.use("delete old requests") as store:
                store.delete_key(self._key(f"requests/{self._requested}"))
            self._requested = None
        if self._shown[0] >= generation and self._shown[1] == self._client.connections:
            return
        with self._client.use("write the newest generation") as store:
            self._update(store, "generation", lambda text: str(max(generation, parse_number(text) or 0)))
            self._shown = generation, self._client.connections

    def shown_generation(self) -> int:
        with self._client.use("read the newest generation") as store:
            text = self._get(store, "generation")
        generation = parse_number(text or "0")
        if generation is None:
            raise BackendFailed(
                f"the store should hold the newest generation, found {text[:40]!r}; does another program use it?"
            )
        return generation

    def _refresh(self, store: TCPStore) -> tuple[StoredVersion, bytes] | None:
        """What the store holds; if this process has seen a newer value, that is put back first."""
        for _ in range(WRITE_TRIES):
            text, seen = self._get(store, "group"), self._seen
            found = StoredVersion.parse(text) if text else None
            if seen is not None and (found is None or found < seen[0]):
                # Several survivors may do this at once. One is first. The others find its value,
                # and replace it if their own is newer.
                self._store_value(store, *seen, text)
            elif found is None or (seen is not None and found == seen[0]):
                return seen
            elif (value := self._get(store, f"value/{found.writer}")) or self._get(store, "group") == text:
                # It is absent where a newer version took its place since the line above.
                self._seen = found, _decoded(value)
                return self._seen
        raise self._busy("group")

    def _store_value(self, store: TCPStore, version: StoredVersion, value: bytes, expected: str) -> str:
        """Make this the newest version if `expected` is; returns the one that is then."""
        store.set(self._value_key(version), b64encode(value).decode())
        return store.compare_set(self._key("group"), expected, version.text).decode(errors="replace")

    def _value_key(self, version: StoredVersion) -> str:
        return self._key(f"value/{version.writer}")

    def _update(self, store: TCPStore, name: str, change: Callable[[str], str]) -> str:
        """Replace the text of a key, empty if there is none, until `change` leaves it as it is.

        Returns that text. Raises BackendFailed after WRITE_TRIES.
        """
        text = self._get(store, name)
        for _ in range(WRITE_TRIES):
            changed = change(text)
            if changed == text:
                return text
            text = store.compare_set(self._key(name), text, changed).decode(errors="replace")
        raise self._busy(name)

    def _busy(self, name: str) -> BackendFailed:
        return BackendFailed(
            f"the store's key {self._key(name)} changed under this node {WRITE_TRIES} times in a row; trying again at the next poll"
        )

    def _get(self, store: TCPStore, name: str) -> str:
        """Empty if there is none. Bytes that are not UTF-8 become a text that no reader accepts."""
        text = store.compare_set(self._key(name), _ABSENT, _ABSENT).decode(errors="replace")
        return "" if text == _ABSENT else text

    def _key(self, name: str) -> str:
        return self._prefix + name


def _decoded(value: str) -> bytes:
    """Raises BackendFailed."""
    try:
        if value:
            return b64decode(value, validate=True)
    except ValueError:
        pass
    raise BackendFailed(
        f"the store should hold the newest version of the group, found {value[:40]!r}; does another program use that port?"
    )


def _parse_nodes(text: str) -> frozenset[str]:
    try:
        found = [parse_json(line) for line in text.splitlines()]
    except ValueError:
        found = [None]
    if not all(isinstance(each, str) for each in found):
        raise BackendFailed(
            f"the store should hold a list of nodes, found {text[:40]!r}; does another program use it?"
        )
    return frozenset(found)
