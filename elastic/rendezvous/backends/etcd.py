"""The version of the group is the revision at which etcd last changed its key, so it only grows.

elastic/<group>/group        the shared state
elastic/<group>/beat/<node>  the counter of one node, under the node's lease of one minute
elastic/<group>/generation   the newest generation as text, for processes outside the group

A write names the revision that it succeeds. Reads are linearizable: every node sees what another
has written. No training node is special, and no member of the cluster either while a majority runs.

It does not promise to survive a loss of etcd's data: a revision older than one seen before is an
error, and never taken for an empty group.
"""

import contextlib
import threading
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.etcd_http import Access, EtcdHttp, NotFound, OutcomeUnknown
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import parse_number

LEASE_S = 60
RENEW_EVERY_S = 15.0
PUBLISH_TRIES = 8
FRESH_S = 0.005
ROOT = "elastic"


class EtcdBackend:
    def __init__(self, endpoints: str, group: str, access: Access, clock: Clock | None = None) -> None:
        """`endpoints`: `HOST[:PORT],...`. `group`: any text. Raises UsageError."""
        self._clock = SystemClock() if clock is None else clock
        self._etcd = EtcdHttp(endpoints, access, self._clock)
        self._prefix = f"{ROOT}/{quote(group, safe='')}/"
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._lease: str | None = None
        self._renewed_s = 0.0
        self._seen = 0
        self._beats: tuple[float, dict[str, int]] | None = None
        self._shown = 0

    def read(self) -> tuple[int, bytes] | None:
        # Every poll reads the group, then the counters: one request brings both. `beats` uses the
        # counters if it is called within FRESH_S.
        answer = self._call(
            "kv/txn", {"success": [self._range("group"), self._range("beat/", is_folder=True)]}
        )
        groups, beats = (_pairs(one.get("response_range")) for one in _list(answer, "responses", 2))
        self._beats = self._clock.monotonic(), self._counted(beats)
        revision, value = (_revision(groups[0]), _value(groups[0])) if groups else (0, b"")
        if revision < self._seen:
            raise BackendFailed(
                f"etcd should have {self._prefix}group at revision {self._seen} or newer, found {revision or 'none'}: it was deleted, or etcd was"
                f" restored from an older copy; stop all agents of the run and start them again"
            )
        self._seen = revision
        return (revision, value) if groups else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        try:
            answer = self._set_if("group", version or 0, value)
        except OutcomeUnknown:
            return False  # It may have won all the same. The next read finds out.
        return answer

    def beat(self, node_id: str) -> None:
        self._beats = None
        with self._lock:
            self._counters[node_id] = self._counters.get(node_id, 0) + 1
            value = str(self._counters[node_id])
            if self._lease is not None and self._clock.monotonic() - self._renewed_s > RENEW_EVERY_S:
                self._renew(self._lease)
            # The lease has expired if this node slept for longer than it. Then it takes a new one.
            with contextlib.suppress(NotFound):
                self._put_beat(node_id, value, self._current_lease())
                return
            self._lease = None
            self._put_beat(node_id, value, self._current_lease())

    def beats(self) -> dict[str, int]:
        fresh, self._beats = self._beats, None
        if fresh is not None and self._clock.monotonic() - fresh[0] < FRESH_S:
            return fresh[1]
        answer = self._call("kv/range", self._range("beat/", is_folder=True)["request_range"])
        return self._counted(_pairs(answer))

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
        found = _pairs(self._call("kv/range", self._range("generation")["request_range"]))
        if not found:
            return 0, 0
        text = _value(found[0])
        generation = parse_number(text)
        if generation is None:
            raise BackendFailed(
                f"etcd should have a number in {self._prefix}generation, found {text[:40]!r}; delete that key, it is written again"
            )
        return _revision(found[0]), generation

    def _set_if(self, name: str, revision: int, value: bytes) -> bool:
        key = self._key(name)
        answer = self._call(
            "kv/txn",
            {
                "compare": [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}],
                "success": [{"request_put": {"key": key, "value": _text(value)}}],
            },
        )
        return answer.get("succeeded") is True

    def _put_beat(self, node_id: str, value: str, lease: str) -> None:
        self._call(
            "kv/put", {"key": self._key(f"beat/{node_id}"), "value": _text(value.encode()), "lease": lease}
        )

    def _current_lease(self) -> str:
        if self._lease is None:
            answer = self._call("lease/grant", {"TTL": str(LEASE_S)})
            self._lease, self._renewed_s = str(answer.get("ID")), self._clock.monotonic()
        return self._lease

    def _renew(self, lease: str) -> None:
        answer = self._call("lease/keepalive", {"ID": lease})
        result = answer.get("result")
        # For an expired lease etcd answers without a TTL.
        is_alive = isinstance(result, dict) and str(result.get("TTL", "0")) != "0"
        self._lease = lease if is_alive else None
        self._renewed_s = self._clock.monotonic()

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._etcd.call(path, body)

    def _key(self, name: str) -> str:
        return _text((self._prefix + name).encode())

    def _range(self, name: str, *, is_folder: bool = False) -> dict[str, Any]:
        key = (self._prefix + name).encode()
        # The first key after all keys that begin with `key`.
        end = {"range_end": _text(key[:-1] + bytes([key[-1] + 1]))} if is_folder else {}
        return {"request_range": {"key": _text(key)} | end}

    def _counted(self, pairs: list[Mapping[str, Any]]) -> dict[str, int]:
        begin = len(f"{self._prefix}beat/".encode())
        counters = {}
        for pair in pairs:
            with contextlib.suppress(ValueError):  # another program wrote it: as good as missing
                counters[_bytes(pair.get("key"))[begin:].decode()] = parse_number(_value(pair))
        return {node_id: counter for node_id, counter in counters.items() if counter is not None}


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _bytes(text: object) -> bytes:
    return b64decode(text, validate=True) if isinstance(text, str) else b""


def _value(pair: Mapping[str, Any]) -> bytes:
    try:
        return _bytes(pair.get("value"))
    except ValueError as error:
        raise BackendFailed(f"etcd should give values in base64, found {pair.get('value')!r:.80}") from error


def _revision(pair: Mapping[str, Any]) -> int:
    text = pair.get("mod_revision")
    revision = parse_number(text) if isinstance(text, str) else None
    if revision is None:
        raise BackendFailed(f"etcd should give a key's revision as a number in a string, found {text!r:.80}")
    return revision


def _pairs(answer: object) -> list[Mapping[str, Any]]:
    """The keys of a range; etcd leaves out what is empty."""
    found = answer.get("kvs", []) if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(pair, dict) for pair in found):
        raise BackendFailed(f"etcd should answer a range with a list of keys, found {str(answer)[:80]!r}")
    return found


def _list(answer: Mapping[str, Any], name: str, length: int) -> list[dict[str, Any]]:
    found = answer.get(name)
    if not isinstance(found, list) or len(found) != length or not all(isinstance(one, dict) for one in found):
        raise BackendFailed(
            f"etcd should answer with {length} {name}, found {str(found)[:80]!r}; is it 3.4 or newer?"
        )
    return found
