"""A call is answered by the first member of an etcd cluster that can, or fails within seconds.

Spoken is the JSON gateway of etcd v3 (3.4 and newer), one POST for each call. TLS, client
certificates and the user come from the variables of etcdctl.

It knows nothing of groups. It does not promise that a call takes effect only once: a request whose
answer is lost is sent to the next member too, so callers make requests that may be repeated.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

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
