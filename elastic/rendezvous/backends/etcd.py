"""The version of the group is the revision at which etcd last changed its key, so it only grows.

elastic/<group>/group           the shared state
elastic/<group>/beat/<node>     the counter of one node, under a lease of one minute
elastic/<group>/request/<node>  what one node asks the others to write for it, under its lease

A write names the revision that it succeeds. A read names the revision that it knows, and gets the
value only if there is another. Reads are linearizable: every node sees what another has written. No
training node is special, and no member of the cluster either while a majority runs.

A heartbeat is told by the revision at which its key last changed. So one transaction can ask
whether the group is as known and some nodes have all moved since this process last looked, and
where that is so, its answer is a header.

It does not promise to survive a loss of etcd's data: a revision older than one seen before is an
error, and never taken for an empty group.
"""

import threading
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable
from urllib.parse import quote

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.etcd_http import Access, EtcdHttp, NotFound, OutcomeUnknown, StoredKey
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import parse_number

LEASE_S = 60
NEW_LEASE_EVERY_S = 15.0
NAMED_AT_MOST = 16  # nodes whose counters are asked for one by one; of more all are read


class EtcdBackend:
    combines_from = 17

    def __init__(self, endpoints: str, group: str, access: Access, clock: Clock | None = None) -> None:
        """`endpoints`: `HOST[:PORT],...`. `group`: any text. Raises UsageError."""
        self._clock = SystemClock() if clock is None else clock
        self._etcd = EtcdHttp(endpoints, access, self._clock)
        self._prefix = f"elastic/{quote(group, safe='')}/"
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._lease = ""
        self._leased_s = float("-inf")
        self._newest = 0, b""  # revision and value
        self._moved: dict[str, int] = {}  # a revision since which the node has moved, or did at it

    def read(self) -> tuple[int, bytes] | None:
        key, seen = _text((self._prefix + "group").encode()), self._newest[0]
        found = self._etcd.call(
            "kv/txn", {"compare": [_is_at(key, seen)], "failure": [{"request_range": {"key": key}}]}
        )
        if found.succeeded:
            return self._newest if seen else None
        stored = next((each for keys in found.ranges for each in keys), None)
        revision = 0 if stored is None else int(stored.mod_revision)
        if revision < seen:
            raise BackendFailed(
                f"etcd should have {self._prefix}group at revision {seen} or newer, found {revision or 'none'}: it was deleted, or etcd was"
                f" restored from an older copy; stop all agents of the run (SIGTERM: their last step is saved) and start them again"
            )
        if stored is None:
            return None
        self._newest = revision, _bytes(stored.value)
        return self._newest

    def read_with_beats(self, node_ids: Collection[str]) -> tuple[tuple[int, bytes] | None, dict[str, int]]:
        if all(node_id in self._moved for node_id in node_ids):
            moved = [_is_after(self._beat_key(name), self._moved[name]) for name in sorted(node_ids)]
            as_known = _is_at(_text((self._prefix + "group").encode()), self._newest[0])
            found = self._etcd.call("kv/txn", {"compare": [as_known, *moved]})
            if found.succeeded:
                # What moves from now on has a greater revision.
                self._moved |= dict.fromkeys(node_ids, int(found.header.revision))
                return self._newest if self._newest[0] else None, {
                    name: self._moved[name] for name in node_ids
                }
        return self.read(), self.beats(node_ids)

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        key = _text((self._prefix + "group").encode())
        request = {
            "compare": [_is_at(key, version or 0)],
            "success": [{"request_put": {"key": key, "value": _text(value)}}],
        }
        try:
            return self._etcd.call("kv/txn", request).succeeded
        except OutcomeUnknown:
            return False  # It may have won all the same. The next read finds out.

    def beat(self, node_id: str) -> None:
        with self._lock:
            self._counters[node_id] = self._counters.get(node_id, 0) + 1
            self._put_leased(f"beat/{node_id}", str(self._counters[node_id]))

    def beats(self, node_ids: Collection[str] | None = None) -> dict[str, int]:
        if node_ids is None or len(node_ids) > NAMED_AT_MOST:
            found = self._read_keys("beat/")
        else:
            ranges = [{"request_range": {"key": self._beat_key(node_id)}} for node_id in sorted(node_ids)]
            found = self._named(self._etcd.call("kv/txn", {"success": ranges}).ranges) if ranges else {}
        beats = {
            (name := key.removeprefix("beat/")): max(revision, self._moved.get(name, 0))
            for key, (revision, text) in found.items()
            # A value that is no number was written by another program, and is as good as missing.
            if parse_number(text) is not None
        }
        self._moved |= beats
        return beats if node_ids is None else {name: beats[name] for name in node_ids if name in beats}

    def request(self, node_id: str, text: str) -> None:
        with self._lock:
            name = f"request/{node_id}"
            if text:
                self._put_leased(name, text)
            else:
                self._etcd.call("kv/deleterange", {"key": _text((self._prefix + name).encode())})

    def requests(self) -> dict[str, str]:
        return {
            name.removeprefix("request/"): text.decode(errors="replace")
            for name, (_, text) in self._read_keys("request/").items()
        }

    def _beat_key(self, node_id: str) -> str:
        return _text(f"{self._prefix}beat/{node_id}".encode())

    def _put_leased(self, name: str, value: str) -> None:
        # A fresh lease needs no keepalive. The old ones expire without a key.
        if self._clock.monotonic() - self._leased_s > NEW_LEASE_EVERY_S:
            self._take_lease()
        try:
            self._put(name, value)
        except NotFound:
            # The lease expired while the machine slept, and its monotonic clock with it.
            self._take_lease()
            self._put(name, value)

    def _put(self, name: str, value: str) -> None:
        key = (self._prefix + name).encode()
        self._etcd.call("kv/put", {"key": _text(key), "value": _text(value.encode()), "lease": self._lease})

    def _take_lease(self) -> None:
        began_s = self._clock.monotonic()
        self._lease = self._etcd.call("lease/grant", {"TTL": str(LEASE_S)}).ID
        self._leased_s = began_s

    def _read_keys(self, begin: str) -> dict[str, tuple[int, bytes]]:
        """Revision and value of the group's keys that begin so, by name without the prefix."""
        first = (self._prefix + begin).encode()
        after = first[:-1] + bytes([first[-1] + 1])  # the first key after all that begin so
        found = self._etcd.call("kv/range", {"key": _text(first), "range_end": _text(after)})
        return self._named((found.kvs,))

    def _named(self, ranges: Iterable[tuple[StoredKey, ...]]) -> dict[str, tuple[int, bytes]]:
        cut = len(self._prefix)  # it is quoted: one byte a letter
        return {
            _bytes(each.key)[cut:].decode(errors="replace"): (int(each.mod_revision), _bytes(each.value))
            for found in ranges
            for each in found
        }


def _is_at(key: str, revision: int) -> dict[str, str]:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def _is_after(key: str, revision: int) -> dict[str, str]:
    return {"key": key, "target": "MOD", "result": "GREATER", "mod_revision": str(revision)}


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise BackendFailed(f"etcd should give keys and values in base64, but {error}") from error
