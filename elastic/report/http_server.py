"""A few pages over HTTP, from threads of their own: no client can hold up the process or a page.

A connection whose client is silent ends after `CONNECTION_S`. There are at most
`MOST_CONNECTIONS`; for one more the oldest is closed, so that slow clients cannot keep a probe out.
Anything that is no GET or HEAD of a known page is answered with an error. The server does not ask
who the reader is; docs/security.md says who can reach it.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from elastic.config.options import ListenAddress
from elastic.errors import ElasticError, UsageError
from elastic.system.clock import Clock

CONNECTION_S = 30.0
MOST_CONNECTIONS = 32
_LOOK_S = 0.25  # between two looks whether it shall stop
_NO_DESCRIPTOR_S = 0.5
_STOP_S = 2.0
TEXT = "text/plain; charset=utf-8"
# No other site may read an answer, show it in a frame, or be told where the reader comes from.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """policy: of a page."""

    body: bytes
    status: int = HTTPStatus.OK
    content_type: str = TEXT
    policy: str = ""


# Makes the answer to a request that has this Accept header.
Page = Callable[[str], Answer]


def listen(address: ListenAddress) -> socket.socket:
    """A socket that listens there, and nowhere else. Raises UsageError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where, family=family, backlog=MOST_CONNECTIONS)
    except (OSError, UnicodeError) as error:  # the second for a name that no host can have
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            f"expected to listen on {address}, found: {found}; give another address or port (0: any free one)"
        ) from error


def is_own_name(text: str | None, name: str) -> bool:
    """Whether a Host header names this server: by an address, as localhost, by the name that it
    listens on, or by the machine's name.

    A page of another site whose name leads here (DNS rebinding) cannot be one of these: its name is
    in its address.
    """
    if not text:
        return False
    host = text.rpartition(":")[0] if text[-1:].isdigit() and ":" in text else text
    host = host.strip("[]").rstrip(".").lower()
    if host in {"localhost", name.lower(), socket.gethostname().lower()}:
        return True
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


class HttpServer(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listening: socket.socket, pages: Mapping[str, Page], clock: Clock, *, name: str | None = None
    ) -> None:
        """pages: by path. name: the server answers those who ask it by this name, an address or the
        machine's name, and nobody else; None for whatever name. It closes the socket when it stops.
        """
        host, port = listening.getsockname()[:2]
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()  # made by the base class
        self.socket = listening
        self.address = ListenAddress(host=host, port=port)
        self.pages, self.name = pages, name
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # connections, the oldest first
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.serve, name="http", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """In this thread, until `stop` or an exception."""
        self.serve_forever(_LOOK_S)

    def stop(self) -> None:
        if self._thread is not None:
            # In a thread, since it waits for the server's loop without a limit.
            threading.Thread(target=self.shutdown, daemon=True).start()
            self._thread.join(_STOP_S)
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # Without a free descriptor the connection stays in the queue, and the loop would be
            # back here at once.
            self._clock.sleep(_NO_DESCRIPTOR_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # its thread finds that it has ended, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """A client that went away, or was cut, is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CONNECTION_S
    server: HttpServer
    server_version, sys_version = "elastic-train", ""

    def do_GET(self) -> None:
        answer = self._answer()
        self.send_response(answer.status)
        headers = _HEADERS | {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body))}
        headers |= {"Content-Security-Policy": answer.policy} if answer.policy else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Requests are no events of the run."""

    def _answer(self) -> Answer:
        if self.server.name is not None and not is_own_name(self.headers.get("Host"), self.server.name):
            sentence = (
                "expected the name or the address of this server in the Host header, found another; open it by"
                " the address that the command printed"
            )
            return Answer(status=HTTPStatus.FORBIDDEN, body=f"{sentence}\n".encode())
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = ", ".join(self.server.pages)
            return Answer(status=HTTPStatus.NOT_FOUND, body=f"expected one of {known}\n".encode())
        try:
            return page(self.headers.get("Accept") or "")
        except ElasticError as error:
            return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=f"{error}\n".encode(errors="replace"))
        # The edge of a thread: without an answer the client would not know why it got none.
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}\n"
            return Answer(status=HTTPStatus.INTERNAL_SERVER_ERROR, body=sentence.encode(errors="replace"))
