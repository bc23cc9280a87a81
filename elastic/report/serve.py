"""The page of a run, live in a browser: it reads the run's files, and changes nothing anywhere.

Training does not notice: the files are read by another process, at a low priority, and for a small
share of the time. It answers those who ask it by a name that is its own: a page of another site
whose name leads here (DNS rebinding) is refused, and no other site may read the answers. It does
not ask who the reader is; docs/security.md says who can reach it.
"""

import ipaddress
import os
import socket
import socketserver
import threading
from contextlib import closing, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from elastic.config.listen_address import ListenAddress
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, UsageError
from elastic.report.download import readable, unreadable
from elastic.report.live_picture import LivePicture, NotNow
from elastic.report.picture.draw import draw
from elastic.report.picture.page import policy
from elastic.report.picture.picture import Picture
from elastic.report.polling import folder_id
from elastic.report.run_reader import RunReader
from elastic.storage.remote import check_url
from elastic.system import interrupt
from elastic.system.clock import SystemClock
from elastic.system.untrusted import printable

_NICENESS = 10
_MOST_CONNECTIONS = 32
_SILENCE_S = 15.0  # of a browser, in the middle of a request or an answer
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def serve(name: str, asked: ListenAddress) -> int:
    """Answer until Ctrl-C. Raises UsageError where there is no run that can be read, or the port
    is not free.
    """
    run = RunDir.parse(name)
    check_url(run.url)
    with closing(RunReader(run)) as reader, _listening(asked) as listener:
        picture = LivePicture(
            lambda: _drawn(run, reader),
            SystemClock(),
            is_remote=run.is_remote,
            place=partial(folder_id, run.local),
        )
        return _serve(run, asked, _Server(listener, asked.host, picture))


def _serve(run: RunDir, asked: ListenAddress, server: "_Server") -> int:
    with server:
        interrupt.raise_from_here()
        os.nice(_NICENESS)
        # A mistake in the name of the run is told here, and not in the browser.
        try:
            server.picture.newest()
        except OSError as error:
            raise unreadable(error) from error
        address, port = server.socket.getsockname()[:2]
        print(
            f"{printable(run.url)} is at http://{_shown(asked.host, port)}/; Ctrl-C ends this"
            + ("" if ipaddress.ip_address(address).is_loopback else "; who reaches this address can read it"),
            flush=True,
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return EXIT_COMPLETE


def is_own_name(text: str | None, host: str) -> bool:
    """Whether a Host header names this server: by an address, as localhost, by the name `host` that
    it listens on, or by the machine's name.

    A page of another site cannot be one of these: its name is in its address.
    """
    if not text:
        return False
    name = text.rpartition(":")[0] if text[-1:].isdigit() and ":" in text else text
    name = name.strip("[]").rstrip(".").lower()
    if name in {"localhost", host.strip("[]").lower(), socket.gethostname().lower()}:
        return True
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _drawn(run: RunDir, reader: RunReader) -> Picture:
    with readable(run) as there:
        return draw(there, None if run.is_remote else reader)  # a copy is read whole


def _listening(asked: ListenAddress) -> socket.socket:
    """Raises UsageError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(
            asked.host, asked.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where[:2], family=family)
    except (OSError, UnicodeError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            f"expected to listen on {asked}, found: {found}; give another address or port: --listen HOST:PORT"
        ) from error


def _shown(host: str, port: int) -> ListenAddress:
    """An address that a browser can be given."""
    return ListenAddress(host=socket.gethostname() if host in {"0.0.0.0", "::"} else host, port=port)  # noqa: S104


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, host: str, picture: LivePicture) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.host, self.picture = host, picture
        self._open: list[socket.socket] = []  # the oldest first
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.append(request)
            oldest = self._open.pop(0) if len(self._open) > _MOST_CONNECTIONS else None
        if oldest is not None:
            # Its thread ends with it: a client that sends a byte now and then shuts out none.
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock, suppress(ValueError):  # it was cut off
                self._open.remove(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error of this program."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENCE_S
    server_version, sys_version = "elastic-train", ""

    def do_GET(self) -> None:
        if not is_own_name(self.headers.get("Host"), self.server.host):
            return self._say(
                HTTPStatus.FORBIDDEN,
                "expected the name or the address of this server in the Host header, found another; open it"
                " by the address that elastic-train serve printed",
            )
        path = self.path.partition("?")[0]
        if path not in {"/", "/picture.json"}:
            return self._say(HTTPStatus.NOT_FOUND, "expected / or /picture.json, found another path")
        try:
            newest = self.server.picture.newest()
        except NotNow as error:
            return self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if path == "/":
            return self._answer(HTTPStatus.OK, "text/html; charset=utf-8", newest.page)
        if self.headers.get("If-None-Match") == newest.tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, "", b"", newest.tag)
        return self._answer(HTTPStatus.OK, "application/json", newest.document, newest.tag)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{sentence}\n".encode(errors="replace"))

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "ETag": tag} | _HEADERS
        headers["Content-Security-Policy"] = f"{policy(polls=True)}; frame-ancestors 'none'"
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed for each request."""
