"""A few pages over HTTP, from threads of their own: no client can hold up the process or a page.

A connection lives for `CONNECTION_S` at most, however slowly its client sends or reads. There are
at most `MOST_CONNECTIONS`; for one more the oldest is closed, so that slow clients cannot keep a
probe out. Anything that is no GET or HEAD of a known page is answered with an error.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from elastic.config.listen_address import ListenAddress
from elastic.errors import UsageError
from elastic.system.clock import Clock

CONNECTION_S = 10.0
MOST_CONNECTIONS = 16
_LOOK_S = 0.25  # between two looks at the ages of connections
_NO_DESCRIPTOR_S = 0.5
_STOP_S = 2.0
_OK, _NOT_FOUND, _BROKEN = 200, 404, 500
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    body: bytes
    status: int = _OK
    content_type: str = TEXT


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
        raise UsageError(
            f"expected an address and a free port of this machine, found --http {address} ({error});"
            " take another port, or port 0 for any free one"
        ) from error


class HttpServer:
    def __init__(self, listening: socket.socket, pages: Mapping[str, Page], clock: Clock) -> None:
        """pages: by path. The server closes the socket when it stops."""
        host, port = listening.getsockname()[:2]
        self.address = ListenAddress(host=host, port=port)
        self._server = _Server(listening, pages, clock)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="http", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            # In a thread, since it waits for the server's loop without a limit.
            threading.Thread(target=self._server.shutdown, daemon=True).start()
            self._thread.join(_STOP_S)
        self._server.server_close()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, pages: Mapping[str, Page], clock: Clock) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()  # the one that the base class made
        self.socket = listening
        self.pages = pages
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s: dict[socket.socket, float] = {}  # of open connections, the oldest first

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
            while len(self._began_s) >= MOST_CONNECTIONS:
                self._cut(next(iter(self._began_s)))
            self._began_s[request] = self._clock.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        now_s = self._clock.monotonic()
        with self._lock:
            for each in [each for each, began_s in self._began_s.items() if now_s - began_s > CONNECTION_S]:
                self._cut(each)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._began_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """A client that went away, or was cut, is no news."""

    def _cut(self, request: socket.socket) -> None:
        """Its thread finds that the connection has ended, and closes it."""
        del self._began_s[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = CONNECTION_S
    server: _Server
    server_version = "elastic-train"
    sys_version = ""

    def do_GET(self) -> None:
        answer = self._answer()
        self._begin(answer)
        self.wfile.write(answer.body)

    def do_HEAD(self) -> None:
        self._begin(self._answer())

    def log_message(self, *_: Any) -> None:
        """Requests are no events of the run."""

    def _answer(self) -> Answer:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = ", ".join(self.server.pages)
            return Answer(status=_NOT_FOUND, body=f"expected one of {known}\n".encode())
        try:
            return page(self.headers.get("Accept") or "")
        # The edge of a thread: without an answer the client would not know why it got none.
        except Exception as error:
            return Answer(status=_BROKEN, body=f"{type(error).__name__}: {error}\n".encode())

    def _begin(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
