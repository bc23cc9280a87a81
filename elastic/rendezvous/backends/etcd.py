"""The version of the group is the revision at which etcd last changed its key, so it only grows.

elastic/<group>/group        the shared state
elastic/<group>/beat/<node>  the text of one node, under a lease of one minute

A write names the revision that it succeeds. A read names the revision that it knows, and gets the
value only if there is another. Reads are linearizable: every node sees what another has written. No
training node is special, and no member of the cluster either while a majority runs.

It does not promise to survive a loss of etcd's data: a revision older than one seen before is an
error, and never taken for an empty group.
"""

import threading
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from urllib.parse import quote

from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.rendezvous.backends.etcd_http import EtcdHttp
from elastic.system.clock import Clock, SystemClock

LEASE_S = 60
NEW_LEASE_EVERY_S = 15.0
NAMED_AT_MOST = 16  # nodes whose texts are asked for one by one; of more all are read
_BEAT = "beat/"


class EtcdBackend:
    def __init__(
        self, endpoints: str, group: str, environ: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        """`endpoints`: `HOST[:PORT],...`. `group`: any text. `environ`: the variables of etcdctl.
        Raises UsageError.
        """
        self._clock = SystemClock() if clock is None else clock
        self._etcd = EtcdHttp(endpoints, environ, self._clock)
        self._prefix = f"elastic/{quote(group, safe='')}/"  # quoted: one byte a letter
        self._lock = threading.RLock()
        self._lease, self._leased_s = "", float("-inf")
        self._newest = 0, b""  # revision and value

    def read(self) -> tuple[int, bytes] | None:
        group, seen = self._key("group"), self._newest[0]
        found = self._etcd.call(
            "kv/txn", {"compare": [_is_at(group, seen)], "failure": [{"request_range": {"key": group}}]}
        )
        if not found.succeeded:
            stored = next(iter(found.kvs), None)
            revision = 0 if stored is None else int(stored.mod_revision)
            if stored is None or revision < seen:
                raise BackendFailed(
                    f"etcd should have {self._prefix}group at revision {seen} or newer, found {revision or 'none'}: it was deleted, or etcd was"
                    f" restored from an older copy; stop all agents of the run (SIGTERM: their last step is saved) and start them again"
                )
            self._newest = revision, _bytes(stored.value)
        return self._newest if self._newest[0] else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        key = self._key("group")
        put = {"request_put": {"key": key, "value": _text(value)}}
        try:
            return self._etcd.call(
                "kv/txn", {"compare": [_is_at(key, version or 0)], "success": [put]}
            ).succeeded
        except BackendRefused:
            raise
        except BackendFailed:
            return False  # It may have won all the same. The next read finds out.

    def show(self, node_id: str, text: str) -> None:
        """Under a fresh lease, which needs no keepalive. The old ones expire without a key."""
        with self._lock:
            now_s = self._clock.monotonic()
            if now_s - self._leased_s > NEW_LEASE_EVERY_S:
                self._lease = self._etcd.call("lease/grant", {"TTL": str(LEASE_S)}).ID
                self._leased_s = now_s
            put = {"key": self._key(_BEAT + node_id), "value": _text(text.encode()), "lease": self._lease}
            try:
                self._etcd.call("kv/put", put)
            except BackendFailed:
                # The lease may have expired while the machine slept, and its monotonic clock with
                # it: the next call takes another.
                self._leased_s = float("-inf")
                raise

    def shown(self, node_ids: Collection[str] | None = None) -> dict[str, str]:
        if node_ids is not None and len(node_ids) <= NAMED_AT_MOST:
            queries = [{"key": self._key(_BEAT + name)} for name in sorted(node_ids)]
        else:  # range_end: the first name after all that begin so
            queries = [{"key": self._key(_BEAT), "range_end": self._key("beat0")}]
        kvs = self._etcd.call("kv/txn", {"success": [{"request_range": query} for query in queries]}).kvs
        begin = len(self._prefix + _BEAT)
        found = {
            _bytes(each.key)[begin:].decode(errors="replace"): _bytes(each.value).decode(errors="replace")
            for each in kvs
        }
        return {name: found[name] for name in (found if node_ids is None else found.keys() & node_ids)}

    def _key(self, name: str) -> str:
        return _text((self._prefix + name).encode())


def _is_at(key: str, revision: int) -> dict[str, str]:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise BackendFailed(f"etcd should give keys and values in base64, but {error}") from error
