"""The version of the group is the revision at which etcd last changed its key, so it only grows.

elastic/<group>/group        the shared state
elastic/<group>/beat/<node>  the counter of one node, under a lease of one minute
elastic/<group>/generation   the newest generation as text, for processes outside the group

A write names the revision that it succeeds. Reads are linearizable: every node sees what another
has written. No training node is special, and no member of the cluster either while a majority runs.

It does not promise to survive a loss of etcd's data: a revision older than one seen before is an
error, and never taken for an empty group.
"""

import contextlib
import threading
from base64 import b64decode, b64encode
from urllib.parse import quote

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.etcd_http import Access, EtcdHttp, NotFound, OutcomeUnknown
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import parse_number

LEASE_S = 60
NEW_LEASE_EVERY_S = 15.0
PUBLISH_TRIES = 8
FRESH_S = 0.005


class EtcdBackend:
    def __init__(self, endpoints: str, group: str, access: Access, clock: Clock | None = None) -> None:
        """`endpoints`: `HOST[:PORT],...`. `group`: any text. Raises UsageError."""
        self._clock = SystemClock() if clock is None else clock
        self._etcd = EtcdHttp(endpoints, access, self._clock)
        self._prefix = f"elastic/{quote(group, safe='')}/"
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._lease = ""
        self._leased_s = float("-inf")
        self._seen = 0
        self._beats: tuple[float, dict[str, int]] | None = None
        self._shown = 0

    def read(self) -> tuple[int, bytes] | None:
        # Every poll reads the group, then the counters: one request brings both. `beats` uses the
        # counters if it is called within FRESH_S.
        keys = self._read_keys()
        self._beats = self._clock.monotonic(), _counters(keys)
        revision, value = keys.get("group", (0, b""))
        if revision < self._seen:
            raise BackendFailed(
                f"etcd should have {self._prefix}group at revision {self._seen} or newer, found {revision or 'none'}: it was deleted, or etcd was"
                f" restored from an older copy; stop all agents of the run and start them again"
            )
        self._seen = revision
        return (revision, value) if revision else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        try:
            return self._set_if("group", version or 0, value)
        except OutcomeUnknown:
            return False  # It may have won all the same. The next read finds out.

    def beat(self, node_id: str) -> None:
        self._beats = None
        with self._lock:
            self._counters[node_id] = self._counters.get(node_id, 0) + 1
            # A fresh lease needs no keepalive. The old ones expire without a key.
            if self._clock.monotonic() - self._leased_s > NEW_LEASE_EVERY_S:
                self._take_lease()
            try:
                self._put_beat(node_id)
            except NotFound:
                # The lease expired while the machine slept, and its monotonic clock with it.
                self._take_lease()
                self._put_beat(node_id)

    def beats(self) -> dict[str, int]:
        fresh, self._beats = self._beats, None
        if fresh is not None and self._clock.monotonic() - fresh[0] < FRESH_S:
            return fresh[1]
        return _counters(self._read_keys())

    def publish_generation(self, generation: int) -> None:
        for _ in range(PUBLISH_TRIES):
            if self._shown >= generation:
                return
            revision, self._shown = self._find_generation()
            if self._shown < generation:
                with contextlib.suppress(OutcomeUnknown):
                    self._set_if("generation", revision, str(generation).encode())

    def shown_generation(self) -> int:
        return self._find_generation()[1]

    def _find_generation(self) -> tuple[int, int]:
        revision, text = self._read_keys().get("generation", (0, b"0"))
        generation = parse_number(text)
        if generation is None:
            raise BackendFailed(
                f"etcd should have a number in {self._prefix}generation, found {text[:40]!r}; delete that key, it is written again"
            )
        return revision, generation

    def _set_if(self, name: str, revision: int, value: bytes) -> bool:
        key = _text((self._prefix + name).encode())
        request = {
            "compare": [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}],
            "success": [{"request_put": {"key": key, "value": _text(value)}}],
        }
        return self._etcd.call("kv/txn", request).succeeded

    def _put_beat(self, node_id: str) -> None:
        key, value = f"{self._prefix}beat/{node_id}".encode(), str(self._counters[node_id]).encode()
        self._etcd.call("kv/put", {"key": _text(key), "value": _text(value), "lease": self._lease})

    def _take_lease(self) -> None:
        began_s = self._clock.monotonic()
        self._lease = self._etcd.call("lease/grant", {"TTL": str(LEASE_S)}).ID
        self._leased_s = began_s

    def _read_keys(self) -> dict[str, tuple[int, bytes]]:
        """Revision and value of every key of the group, by name without the prefix."""
        begin, cut = self._prefix.encode(), len(self._prefix)  # the name is quoted: one byte a letter
        end = begin[:-1] + bytes([begin[-1] + 1])  # the first key after all that begin with the prefix
        found = self._etcd.call("kv/range", {"key": _text(begin), "range_end": _text(end)})
        try:
            return {
                _bytes(each.key)[cut:].decode(errors="replace"): (int(each.mod_revision), _bytes(each.value))
                for each in found.kvs
            }
        except ValueError as error:
            raise BackendFailed(f"etcd should give keys and values in base64, but {error}") from error


def _counters(keys: dict[str, tuple[int, bytes]]) -> dict[str, int]:
    """A value that is no number was written by another program, and is as good as missing."""
    return {
        name.removeprefix("beat/"): counter
        for name, (_, text) in keys.items()
        if name.startswith("beat/") and (counter := parse_number(text)) is not None
    }


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return b64decode(text, validate=True)
