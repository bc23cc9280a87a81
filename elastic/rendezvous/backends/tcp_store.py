"""Versions never step back, although one agent keeps the store in its memory and may lose it.

elastic/<group>/group        "<version> <writer> <value in base64>"
elastic/<group>/nodes        the ids of all nodes that ever sent a heartbeat, as a JSON list
elastic/<group>/beat/<node>  the counter of one node
elastic/<group>/generation   the newest generation as text

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
import threading
import uuid
from base64 import b64decode, b64encode
from dataclasses import dataclass
from urllib.parse import quote

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public by its documentation

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.tcp_store_client import TcpStoreClient, is_own_address
from elastic.system.addresses import split_endpoint
from elastic.system.clock import SystemClock
from elastic.system.untrusted import parse_json, parse_number

DEFAULT_PORT = 29400  # torchrun's
WRITE_TRIES = 50

# TCPStore has no read that returns at once for an absent key: `get` waits for it. `compare_set`
# with an expected value that no key ever has returns the value, or this expected value for an
# absent key.
_ABSENT = "-"
_VERSIONS_PER_GENERATION = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """One version of the group's state, as the store holds it.

    `writer` is new for each write. Two nodes that evict the same dead node write equal bytes for
    the same version: only by the writer does each know whether its own write won.
    """

    version: int
    writer: str
    value: bytes

    @property
    def rank(self) -> tuple[int, str]:
        """Of two histories that meet, every node takes the one with the higher rank."""
        return self.version, self.writer

    @property
    def text(self) -> str:
        return f"{self.version} {self.writer} {b64encode(self.value).decode()}"

    @staticmethod
    def parse(data: bytes) -> "StoredValue | None":
        """None for an absent key. Raises BackendFailed."""
        if data == _ABSENT.encode():
            return None
        try:
            text, writer, value = data.decode("ascii").split(" ")
            version = parse_number(text)
            if version is None:
                raise ValueError(f"{text[:40]} is no version")
            return StoredValue(version=version, writer=writer, value=b64decode(value, validate=True))
        except ValueError as error:
            raise BackendFailed(
                f"the store should hold a group as this version of elastic-train writes it, found {data[:40]!r}; does another program use"
                f" that port?"
            ) from error


class TcpStoreBackend:
    def __init__(self, endpoint: str, group: str) -> None:
        """`endpoint`: `HOST[:PORT]`. `group`: any text. Raises UsageError."""
        host, port = split_endpoint(endpoint, DEFAULT_PORT)
        host = host.strip("[]")
        self._client = TcpStoreClient(host, port, may_host=is_own_address(host), clock=SystemClock())
        self._prefix = f"elastic/{quote(group, safe='')}/"
        self._lock = threading.Lock()
        self._seen: StoredValue | None = None
        self._counters: dict[str, int] = {}
        self._listed: dict[str, int] = {}
        self._generation = 0
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
        return None if found is None else (found.version, found.value)

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._client.use("read the group's state") as store:
            if self._version != version:
                self._refresh(store)
        if self._version != version:
            return False
        # After the store was lost, two histories can meet: that of a survivor, with many versions
        # of few generations, and a new one, with few versions but more generations. The later
        # generation must win. So each generation begins at a version above all that the one before
        # could reach.
        lowest = self._generation * _VERSIONS_PER_GENERATION
        successor = StoredValue(version=max(version or 0, lowest) + 1, writer=uuid.uuid4().hex, value=value)
        expected = "" if self._seen is None else self._seen.text
        # If the answer is lost, the write may have won all the same. The next read finds out.
        with contextlib.suppress(BackendFailed), self._client.use("write the group's state") as store:
            answer = store.compare_set(self._key("group"), expected, successor.text)
            if answer == successor.text.encode():
                self._seen = successor
                return True
        return False

    def beat(self, node_id: str) -> None:
        with self._lock, self._client.use("write a heartbeat") as store:
            key = self._key(f"beat/{node_id}")
            wanted = self._counters.get(node_id, 0) + 1
            found = store.add(key, 1)
            if found < wanted:  # a new, empty store: a counter that steps back could repeat a value
                found = store.add(key, wanted - found)
            self._counters[node_id] = found
            if self._listed.get(node_id) != self._client.connections:
                self._add_to_nodes(store, node_id)
                self._listed[node_id] = self._client.connections

    def beats(self) -> dict[str, int]:
        with self._client.use("read heartbeats") as store:
            nodes = self._nodes(store)[1]
            # `multi_get` waits for absent keys. None is absent: a node is listed after its first
            # heartbeat.
            values = store.multi_get([self._key(f"beat/{node_id}") for node_id in nodes]) if nodes else []
        counters = {node_id: parse_number(value) for node_id, value in zip(nodes, values, strict=True)}
        return {node_id: counter for node_id, counter in counters.items() if counter is not None}

    def publish_generation(self, generation: int) -> None:
        self._generation = max(self._generation, generation)
        if self._shown[0] >= generation and self._shown[1] == self._client.connections:
            return
        key = self._key("generation")
        with self._client.use("write the newest generation") as store:
            for _ in range(WRITE_TRIES):
                found = store.compare_set(key, _ABSENT, _ABSENT)
                text = found.decode(errors="replace")
                shown = parse_number(found) or 0
                if shown >= generation:
                    break
                store.compare_set(key, "" if text == _ABSENT else text, str(generation))
            self._shown = generation, self._client.connections

    def shown_generation(self) -> int:
        with self._client.use("read the newest generation") as store:
            found = store.compare_set(self._key("generation"), _ABSENT, _ABSENT)
        if found == _ABSENT.encode():
            return 0
        generation = parse_number(found)
        if generation is None:
            raise BackendFailed(
                f"the store should hold the newest generation, found {found[:40]!r}; does another program use it?"
            )
        return generation

    @property
    def _version(self) -> int | None:
        return None if self._seen is None else self._seen.version

    def _refresh(self, store: TCPStore) -> StoredValue | None:
        """What the store holds; if this process has seen a newer value, that is put back first."""
        key, seen = self._key("group"), self._seen
        found = StoredValue.parse(store.compare_set(key, _ABSENT, _ABSENT))
        for _ in range(WRITE_TRIES):
            if seen is None or (found is not None and found.rank >= seen.rank):
                self._seen = found
                return found
            # Several survivors may do this at once. One is first. The others find its value, and
            # replace it if their own is newer.
            found = StoredValue.parse(store.compare_set(key, "" if found is None else found.text, seen.text))
        raise BackendFailed(
            f"the store lost its contents, and the group's newest state could not be put back {WRITE_TRIES} times in a row; trying again at the next"
            f" poll"
        )

    def _add_to_nodes(self, store: TCPStore, node_id: str) -> None:
        for _ in range(WRITE_TRIES):
            text, nodes = self._nodes(store)
            if node_id in nodes:
                return
            store.compare_set(self._key("nodes"), text, json.dumps([*nodes, node_id]))
        raise BackendFailed(
            f"the list of nodes changed under {node_id} {WRITE_TRIES} times in a row; trying again"
        )

    def _nodes(self, store: TCPStore) -> tuple[str, list[str]]:
        """The list as text, empty if there is none yet, and its nodes."""
        # Bytes that are not UTF-8 become a text that is not a JSON list, and are refused below.
        text = store.compare_set(self._key("nodes"), _ABSENT, _ABSENT).decode(errors="replace")
        if text == _ABSENT:
            return "", []
        try:
            nodes = parse_json(text)
        except ValueError:
            nodes = None
        if not isinstance(nodes, list) or not all(isinstance(one, str) for one in nodes):
            raise BackendFailed(
                f"the store should hold a list of nodes, found {text[:40]!r}; does another program use it?"
            )
        return text, nodes

    def _key(self, name: str) -> str:
        return self._prefix + name
