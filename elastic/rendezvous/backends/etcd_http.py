"""A call is answered by the first member of an etcd cluster that can, or fails within seconds.

The failure says whether the call may have taken effect. Spoken is the JSON gateway of etcd v3 (3.4
and newer), one POST for each call. TLS, client certificates and the user come from the variables of
etcdctl.

It knows nothing of groups. It does not promise that a call takes effect only once: a request whose
answer is lost is sent to the next member too, so callers make requests that may be repeated.
"""

import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

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

_NOT_FOUND = 5  # codes of gRPC
_UNAUTHENTICATED = 16
_STALE_TOKEN = ("invalid auth token", "revision in header is old", "user name is empty")


class OutcomeUnknown(BackendFailed):
    """The request was sent and no answer came: it may take effect, now or later."""


class NotFound(BackendFailed):
    """The member answered that the thing named in the request, such as a lease, does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials, and the authority to trust: PEM files and "name:password", as for etcdctl."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    user: str | None = None

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> "Access":
        """From ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY, ETCDCTL_USER and ETCDCTL_PASSWORD.

        The password may be in ETCDCTL_USER instead, after a colon. Raises UsageError without one.
        """
        user, password = environ.get("ETCDCTL_USER"), environ.get("ETCDCTL_PASSWORD")
        if user and ":" not in user and password:
            user = f"{user}:{password}"
        if user and ":" not in user:
            raise UsageError(
                f"ETCDCTL_USER should be name:password, found only the name {user!r}; add :password, or set ETCDCTL_PASSWORD"
            )
        return Access(
            ca=environ.get("ETCDCTL_CACERT") or None,
            certificate=environ.get("ETCDCTL_CERT") or None,
            key=environ.get("ETCDCTL_KEY") or None,
            user=user or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """Key and value are in base64."""

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
class Header:
    """revision: of the whole store, when the call took effect."""

    revision: Annotated[str, pattern("[0-9]{1,18}", "a whole number as text")] = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All fields that are read of any answer: etcd leaves out empty ones.

    `code` is one of gRPC. Versions differ in whether `message` or `error` says what is wrong.
    """

    header: Header = Header()
    kvs: tuple[StoredKey, ...] = ()
    responses: tuple[Response, ...] = ()
    succeeded: bool = False
    ID: str = ""
    token: str = ""
    code: int = 0
    message: str = ""
    error: str = ""

    @property
    def ranges(self) -> tuple[tuple[StoredKey, ...], ...]:
        """What each request of a transaction found."""
        return tuple(response.response_range.kvs for response in self.responses)


class _Refusal(Exception):  # noqa: N818 - it says what is wrong
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.is_stale = code == _UNAUTHENTICATED or any(text in message for text in _STALE_TOKEN)


class EtcdHttp:
    """One cluster. Calls may come from several threads."""

    def __init__(self, endpoints: str, access: Access, clock: Clock | None = None) -> None:
        """`endpoints`: `HOST[:PORT],...`, each after https:// for TLS. Raises UsageError."""
        self._urls = tuple(_url(endpoint) for endpoint in endpoints.split(","))
        self._clock = SystemClock() if clock is None else clock
        self._access = access
        self._pool = _pool(access)
        self._at = 0
        self._token: str | None = None
        self._lock = threading.Lock()

    def call(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST `body` to `/v3/<path>`, trying each member at most twice, for 3 s in all, with a
        log-in where the member asks for one.

        Raises OutcomeUnknown if a member received the request and no member answered; BackendFailed
        if no member was reached; BackendRefused if a member refused; NotFound.
        """
        deadline = self._clock.monotonic() + CALL_S
        failures: list[BackendFailed] = []
        for turn in range(2 * len(self._urls)):
            if failures and self._clock.monotonic() >= deadline:
                break
            url = self._urls[self._at % len(self._urls)]
            try:
                return self._authorized(url, path, body, deadline)
            except NotFound:
                raise
            except BackendFailed as error:
                if isinstance(error, BackendRefused) and turn >= len(self._urls) - 1:
                    raise
                failures.append(error)
                # Not locked: two threads that fail at once skip two members, which does no harm.
                self._at += 1
        may_be_done = any(isinstance(error, OutcomeUnknown) for error in failures)
        raise OutcomeUnknown(str(failures[-1])) if may_be_done else failures[-1]

    def _authorized(
        self, url: str, path: str, body: Mapping[str, Any], deadline: float, *, is_retry: bool = False
    ) -> Answer:
        """The answer of one member. A token that it does not know is replaced once.

        Tokens expire, and a restarted member may have forgotten all of them.
        """
        try:
            return self._ask(url, path, body, self._current_token(url, deadline), deadline)
        except _Refusal as refusal:
            if self._access.user is not None and refusal.is_stale and not is_retry:
                self._token = None
                return self._authorized(url, path, body, deadline, is_retry=True)
            raise BackendRefused(
                f"etcd at {url} should allow {path}, but refuses it: {refusal}; check ETCDCTL_USER, the"
                f" permissions of its role on the prefix elastic/, and the etcd version (3.4 or newer)"
            ) from refusal

    def _current_token(self, url: str, deadline: float) -> str:
        """Empty without a user, and for a server without authentication."""
        if self._access.user is None:
            return ""
        with self._lock:
            if self._token is None:
                name, _, password = self._access.user.partition(":")
                body = {"name": name, "password": password}
                try:
                    self._token = self._ask(url, "auth/authenticate", body, "", deadline).token
                except _Refusal as refusal:
                    if "not enabled" not in str(refusal):
                        raise BackendRefused(
                            f"etcd at {url} should know the user {name!r} with the password in ETCDCTL_USER (name:password), but says: {refusal}"
                        ) from refusal
                    self._token = ""
            return self._token

    def _ask(self, url: str, path: str, body: Mapping[str, Any], token: str, deadline: float) -> Answer:
        left_s = max(deadline - self._clock.monotonic(), 0.1)
        try:
            response = self._pool.request(
                "POST",
                f"{url}/v3/{path}",
                json=body,
                headers={"Authorization": token} if token else {},
                timeout=urllib3.Timeout(connect=CONNECT_S, read=ANSWER_S, total=left_s),
            )
        except (HTTPError, OSError) as error:
            raise _unanswered(url, error) from error
        return _answer(url, response.status, response.data)


def _answer(url: str, status: int, data: bytes) -> Answer:
    try:
        answer = decode(Answer, data, what=f"the answer of etcd at {url}", exact=False)
    except ValueError as error:
        raise OutcomeUnknown(f"{error} (HTTP {status}); is it etcd 3.4 or newer?") from error
    if status == HTTPStatus.OK:
        return answer
    message = f"{answer.message or answer.error or repr(data[:200])} (HTTP {status})"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise OutcomeUnknown(
            f"etcd at {url} could not do it now: {message}; does a majority of its members run?"
        )
    if answer.code == _NOT_FOUND:
        raise NotFound(f"{url} has no such thing: {message}")
    raise _Refusal(answer.code, message)


def _unanswered(url: str, error: HTTPError | OSError) -> BackendFailed:
    if isinstance(error, SSLError | ssl.SSLError):
        return BackendRefused(
            f"etcd at {url} should prove who it is by TLS, and accept us, but: {error}; check ETCDCTL_CACERT, ETCDCTL_CERT and"
            f" ETCDCTL_KEY, and that the certificate names this host"
        )
    advice = "is it running, and reachable from this machine?"
    if isinstance(error, NewConnectionError | ConnectTimeoutError):
        return BackendFailed(f"etcd at {url} should answer, but cannot be reached ({error}); {advice}")
    return OutcomeUnknown(f"etcd at {url} took a request and did not answer ({error}); {advice}")


def _pool(access: Access) -> urllib3.PoolManager:
    files = {"ETCDCTL_CACERT": access.ca, "ETCDCTL_CERT": access.certificate, "ETCDCTL_KEY": access.key}
    for variable, path in files.items():
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"{variable} should name a PEM file, but {path} cannot be read ({error.strerror})"
            ) from error
    return urllib3.PoolManager(
        maxsize=4,
        # `call` decides what to repeat. The library would repeat a request without saying so.
        retries=False,
        ca_certs=access.ca,
        cert_file=access.certificate,
        key_file=access.key,
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
