"""A proxy in front of a store that is reached over HTTP, and that fails as such stores do.

Its faults are errors, silence, and late and lost answers.
"""

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Deed(Enum):
    ERROR = "answers 500"
    SLOW_DOWN = "answers 503 SlowDown"
    HANG = "never answers"
    LOSE = "does what is asked and never says so"


@dataclass(slots=True, kw_only=True)
class Fault:
    """`times`: how many requests it strikes, None for all; `struck` counts them."""

    deed: Deed
    applies: Callable[[str, str], bool]
    times: int | None
    struck: int = 0


_ERRORS = {Deed.ERROR: (500, "InternalError"), Deed.SLOW_DOWN: (503, "SlowDown")}


class FaultyStorage:
    def __init__(self, port: int, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """port: of the store on the loopback interface. listen: the address and port of the proxy,
        any free one for 0.
        """
        proxy = self
        self._port = port
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._released = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.serve(self, body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one  # noqa: N815 - the names that http.server calls

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(listen, Handler)
        self._server.daemon_threads = True
        # A client that is killed resets its connection, which is not worth a traceback.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def fail(self, deed: Deed, applies: Callable[[str, str], bool], times: int | None = None) -> Fault:
        """`applies`: to a method and a path with its query."""
        fault = Fault(deed=deed, applies=applies, times=times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()
        self._released.set()
        self._released = threading.Event()

    def close(self) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def serve(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        # Before it is known to be struck: a healing in between then releases it.
        released = self._released
        deed = self._deed(request.command, request.path)
        if deed is Deed.HANG:
            released.wait(250)
            request.close_connection = True
            return
        if deed in _ERRORS:
            status, code = _ERRORS[deed]
            error = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No.</Message></Error>"
            _answer(request, status, {"Content-Type": "application/xml"}, error.encode())
            return
        answer = self._pass_on(request, body)
        if deed is Deed.LOSE:
            request.close_connection = True
            return
        _answer(request, *answer)

    def _deed(self, method: str, path: str) -> Deed | None:
        with self._lock:
            for fault in self._faults:
                if fault.times != fault.struck and fault.applies(method, path):
                    fault.struck += 1
                    return fault.deed
        return None

    def _pass_on(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        server = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        unwanted = {"expect", "connection"}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in unwanted}
        try:
            server.request(request.command, request.path, body, headers)
            answer = server.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            server.close()


def _answer(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes) -> None:
    request.send_response_only(status)
    dropped = {"connection", "transfer-encoding"}
    length = headers.get("Content-Length", str(len(data)))
    for name, value in headers.items():
        if name.lower() not in dropped | {"content-length"}:
            request.send_header(name, value)
    request.send_header("Content-Length", length if request.command == "HEAD" else str(len(data)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)
