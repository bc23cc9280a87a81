"""A metadata service answers a request within a bounded time, or the caller learns why it did not.

Each cloud has one at an address that only its machines reach. It is asked directly: a proxy of the
environment would ask the service of its own machine. Nothing is tried twice here, and no redirect
is followed. The bound holds for the whole answer, also of a service that sends a byte now and then;
it does not promise one for a TLS handshake, of which each read may take `CONNECT_S`.
"""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

CONNECT_S = 1.0
ANSWER_S = 5.0
ANSWER_LIMIT_BYTES = 1024 * 1024


class NoAnswer(Exception):  # noqa: N818 - it says what is wrong
    """No usable answer came, and the text says why: the caller asks again later."""


class Silence(NoAnswer):
    """There was a connection, and nothing came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """headers: by names in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace").strip()

    def expect_ok(self) -> None:
        """Raises NoAnswer."""
        if self.status != HTTPStatus.OK:
            raise NoAnswer(f"HTTP {self.status}")


class MetadataService:
    def __init__(self, url: str) -> None:
        """url: `http://HOST[:PORT]`."""
        self.url = url

    def ask(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", answer_s: float = ANSWER_S
    ) -> Answer:
        """answer_s: from the request to the end of the answer. Raises NoAnswer."""
        connection = _connection(self.url)
        try:
            return _answer(connection, method, path, headers, answer_s)
        # RuntimeError: no thread is left for the limit.
        except (HTTPError, HTTPException, OSError, ValueError, RuntimeError) as error:
            raise NoAnswer(_reason(error)) from error
        finally:
            connection.close()


def _connection(url: str) -> HTTPConnection:
    """One for each request: that of a request that was cut off cannot be used again."""
    parts = urllib3.util.parse_url(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.host or "", parts.port, timeout=CONNECT_S)


def _answer(
    connection: HTTPConnection, method: str, path: str, headers: Mapping[str, str], answer_s: float
) -> Answer:
    """Raises NoAnswer, or what http.client and urllib3 raise."""
    connection.connect()
    connection.timeout = None  # from here on the limit is on all reads together
    with _cut_off_after(answer_s, connection.sock) as is_cut_off:
        response = None
        try:
            connection.request(method, path, headers=headers, preload_content=False)
            response = connection.getresponse()
            body = response.read(ANSWER_LIMIT_BYTES + 1)
        except (HTTPError, HTTPException, OSError) as error:
            if not is_cut_off.is_set():
                raise
            if response is None:
                raise Silence(f"no answer within {answer_s:g} s") from error
            raise NoAnswer(f"no whole answer within {answer_s:g} s") from error
        if is_cut_off.is_set():  # a body without a length ends without an error
            raise NoAnswer(f"no whole answer within {answer_s:g} s")
    if len(body) > ANSWER_LIMIT_BYTES:
        raise NoAnswer(f"an answer of more than {ANSWER_LIMIT_BYTES} bytes")
    found = {name.lower(): value for name, value in response.headers.items()}
    return Answer(status=response.status, body=body, headers=found)


@contextmanager
def _cut_off_after(seconds: float, connected: socket.socket) -> Iterator[threading.Event]:
    """Ends both directions of the socket by then, which ends each call that waits for it. The event
    says so.
    """
    is_cut_off = threading.Event()

    def cut_off() -> None:
        is_cut_off.set()
        with suppress(OSError):  # it is closed
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # that of a TLS socket is for one thread

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield is_cut_off
    finally:
        timer.cancel()
        timer.join()  # else it may shut down a socket that has the closed one's number


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectTimeoutError):
        return f"no connection within {CONNECT_S:g} s"
    if isinstance(error, NewConnectionError):
        return f"no connection: {error.__cause__ or error}"
    return f"no whole answer: {error}"
