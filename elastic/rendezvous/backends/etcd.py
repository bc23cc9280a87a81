"""The version of the group is the revision at which etcd last changed its key, so it only grows.

elastic/<group>/group        the shared state
elastic/<group>/beat/<node>  the text of one node, under a lease of one minute

A write names the revision that it succeeds. A read names the revision that it knows, and gets the
value only if there is another. Reads are linearizable: every node sees what another has written. No
training node is special, and no member of the cluster either while a majority runs.

A call is answered by the first member of the cluster that can, or fails within seconds. Spoken is
the JSON gateway of etcd v3 (3.4 and newer), one POST for each call. TLS, client certificates and
the user come from the variables of etcdctl.

It does not promise to survive a loss of etcd's data: a revision older than one seen before is an
error, and never taken for an empty group. Nor does it promise that a call takes effect only once: a
request whose answer is lost is sent to the next member too, so callers make requests that may be
repeated.
"""

import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import urllib3
from urllib3.exceptions import HTTPError, SSLError

from elastic.errors import UsageError
from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.system.addresses import split_endpoint
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import decode, pattern

DEFAULT_PORT = 2379
CONNECT_S = 0.5
# The members of a cluster take a second to notice that their leader is gone and to elect another. A
# request that waits for that is still answered within this limit.
ANSWER_S = 1.5
CALL_S = 3.0

_NOT_FOUND = 5  # codes of gRPC; here of a lease
_UNAUTHENTICATED = 16
_LOG_IN = ("invalid auth token", "revision in header is old", "user name is empty")

LEASE_S = 60
NEW_LEASE_EVERY_S = 15.0
NAMED_AT_MOST = 16  # nodes whose texts are asked for one by one; of more all are read
_BEAT = "beat/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """Key and value are in base64. mod_revision: of the store when the key last changed."""

    key: str
    value: str = ""
    mod_revision: Annotated[str, pattern("[0-9]{1,18}", "a whole number as text")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResponse:
    kvs: tuple[StoredKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """To one request of a transaction; only ranges are read."""

    response_range: RangeResponse = RangeResponse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All fields that are read of any answer: etcd leaves out empty ones.

    `code` is one of gRPC, of a refusal. Versions differ in whether `message` or `error` says why.
    """

    responses: tuple[Response, ...] = ()
    succeeded: bool = False
    ID: str = ""
    token: str = ""
    code: int = 0
    message: str = ""
    error: str = ""

    @property
    def kvs(self) -> tuple[StoredKey, ...]:
        """What the requests of a transaction found."""
        return tuple(key for response in self.responses for key in response.response_range.kvs)

    @property
    def reason(self) -> str:
        return self.message or self.error


class EtcdHttp:
    """One cluster. Calls may come from several threads."""

    def __init__(self, endpoints: str, environ: Mapping[str, str], clock: Clock | None = None) -> None:
        """`endpoints`: `HOST[:PORT],...`, each after https:// for TLS. `environ`: the variables of
        etcdctl. Raises UsageError.
        """
        self._urls = tuple(_url(endpoint) for endpoint in endpoints.split(","))
        self._clock = SystemClock() if clock is None else clock
        self._user, self._pool = environ.get("ETCDCTL_USER", ""), _pool(environ)
        self._at = 0
        self._token = ""

    def call(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST `body` to `/v3/<path>`, trying each member at most twice, none after 3 s, with a
        log-in where the member asks for one.

        Raises BackendFailed if no member answered, whatever has taken effect by then;
        BackendRefused if each member refused.
        """
        deadline = self._clock.monotonic() + CALL_S
        turn = 0
        while True:
            turn += 1
            try:
                return self._answered(self._urls[self._at % len(self._urls)], path, body)
            except BackendFailed as error:
                # Not locked: two threads that fail at once skip two members, which does no harm.
                self._at += 1
                most = len(self._urls) * (1 if isinstance(error, BackendRefused) else 2)
                if turn >= most or self._clock.monotonic() >= deadline:
                    raise

    def _answered(self, url: str, path: str, body: Mapping[str, Any]) -> Answer:
        """The answer of one member. It may ask for a log-in at any time: tokens expire, and a
        restarted member may have forgotten all of them.
        """
        answer = self._ask(url, path, body)
        asks = answer.code == _UNAUTHENTICATED or any(text in answer.reason for text in _LOG_IN)
        if self._user and answer.code and asks:
            name, _, password = self._user.partition(":")
            self._token = ""
            entry = self._ask(url, "auth/authenticate", {"name": name, "password": password})
            if entry.code:
                raise BackendRefused(
                    f"etcd at {url} should know the user {name!r} with the password in ETCDCTL_USER (name:password), but says: {entry.reason}"
                )
            self._token = entry.token
            answer = self._ask(url, path, body)
        if not answer.code:
            return answer
        raise BackendRefused(
            f"etcd at {url} should allow {path}, but refuses it: {answer.reason}; check ETCDCTL_USER, the"
            f" permissions of its role on the prefix elastic/, and the etcd version (3.4 or newer)"
        )

    def _ask(self, url: str, path: str, body: Mapping[str, Any]) -> Answer:
        try:
            response = self._pool.request(
                "POST",
                f"{url}/v3/{path}",
                json=body,
                headers={"Authorization": self._token} if self._token else {},
                timeout=urllib3.Timeout(connect=CONNECT_S, read=ANSWER_S),
            )
        except (HTTPError, OSError) as error:
            raise _unanswered(url, error) from error
        return _answer(url, response.status, response.data)


def _answer(url: str, status: int, data: bytes) -> Answer:
    try:
        answer = decode(Answer, data, what=f"the answer of etcd at {url}", exact=False)
    except ValueError as error:
        raise BackendFailed(f"{error} (HTTP {status}); is it etcd 3.4 or newer?") from error
    if answer.code == _NOT_FOUND:
        raise BackendFailed(f"{url} has no such thing: {answer.reason}")
    if status == HTTPStatus.OK or (answer.code and status < HTTPStatus.INTERNAL_SERVER_ERROR):
        return answer
    raise BackendFailed(
        f"etcd at {url} could not do it now: {answer.reason or repr(data[:200])} (HTTP {status}); does a majority of its members run?"
    )


def _unanswered(url: str, error: HTTPError | OSError) -> BackendFailed:
    if isinstance(error, SSLError | ssl.SSLError):
        return BackendRefused(
            f"etcd at {url} should prove who it is by TLS, and accept us, but: {error}; check ETCDCTL_CACERT, ETCDCTL_CERT and"
            f" ETCDCTL_KEY, and that the certificate names this host"
        )
    return BackendFailed(
        f"etcd at {url} did not answer ({error}); is it running, and reachable from this machine?"
    )


def _pool(environ: Mapping[str, str]) -> urllib3.PoolManager:
    files = {name: environ.get(f"ETCDCTL_{name}") or None for name in ("CACERT", "CERT", "KEY")}
    for name, path in files.items():
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"ETCDCTL_{name} should name a PEM file, but {path} cannot be read ({error.strerror})"
            ) from error
    return urllib3.PoolManager(
        maxsize=4,
        # `call` decides what to repeat. The library would repeat a request without saying so.
        retries=False,
        ca_certs=files["CACERT"],
        cert_file=files["CERT"],
        key_file=files["KEY"],
        cert_reqs="CERT_REQUIRED",
    )


def _url(endpoint: str) -> str:
    scheme, separator, rest = endpoint.strip().rpartition("://")
    if separator and scheme not in ("http", "https"):
        raise UsageError(
            f"expected an etcd endpoint like etcd-1:{DEFAULT_PORT} or https://etcd-1:{DEFAULT_PORT}, found {endpoint!r}"
        )
    host, port = split_endpoint(rest.rstrip("/"), DEFAULT_PORT)
    return f"{scheme or 'http'}://{host}:{port}"


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
