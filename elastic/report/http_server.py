"""A few pages over HTTP, from threads of their own: no client can hold up the process or a page.

A connection whose client is silent ends after `CONNECTION_S`. One that comes while the process has
`MOST_THREADS` is closed at once. Anything that is no GET or HEAD of a known page is answered with
an error. The server does not ask who the reader is; docs/security.md says who can reach it.
"""

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from elastic.config.options import ListenAddress
from elastic.errors import ElasticError, UsageError

CONNECTION_S = 30.0
MOST_THREADS = 64  # of the process; each connection has one
_LOOK_S = 0.25  # between two looks whether it shall stop
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


def is_own_name(text: str | None, name: str) -> bool:
    """Whether a Host header names this server: by an address, as localhost, by the name that it
    listens on, or by the machine's name.

    A page of another site whose name leads here (DNS rebinding) cannot be one of these: its name is
    in its address.
    """
    host = re.sub(r":[0-9]+$", "", text or "").strip("[]").rstrip(".").lower()
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host in {"localhost", name.lower(), socket.gethostname().lower()}


class HttpServer(ThreadingHTTPServer):
    request_queue_size = MOST_THREADS

    def __init__(self, where: ListenAddress, pages: Mapping[str, Page], *, name: str | None = None) -> None:
        """Listens there, and nowhere else, from now on. Raises UsageError.

        pages: by path. name: only requests that name this host, an address or the machine's name
        are answered; with None all requests are.
        """
        self.pages, self.name = pages, name
        address: Any
        try:
            self.address_family, _, _, _, address = socket.getaddrinfo(
                where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            super().__init__(address, _Connection)
        except (OSError, UnicodeError) as error:  # the second for a name that no host can have
            found = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UsageError(
                f"expected to listen on {where}, found: {found}; give another address or port (0: any free one)"
            ) from error
        host, port = self.server_address[:2]
        self.address = ListenAddress(host=str(host), port=port)
        threading.Thread(target=self.serve_forever, args=[_LOOK_S], name="http", daemon=True).start()

    def server_bind(self) -> None:
        """Without a question to the DNS, which the base class asks."""
        TCPServer.server_bind(self)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def verify_request(self, _request: object, _client_address: object) -> bool:
        return threading.active_count() < MOST_THREADS

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """A client that went away, or was cut, is no news."""


class _Connection(BaseHTTPRequestHandler):
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

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

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
