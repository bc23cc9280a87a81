"""The metadata services of three clouds on a loopback port, as their documents describe them.

A fault strikes the next request, whatever it asks for: a number is an HTTP status, bytes are the
body of a 200, HANG holds the request until `close`, CLOSE cuts the connection without an answer.
"""

import json
import threading
from collections import deque
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

HANG, CLOSE = "hang", "close"


Fault = int | bytes | str


class MetadataServer:
    """`requests`: method, path and headers of each, as they came; `held`: how many wait."""

    def __init__(self) -> None:
        server = self
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.held = 0
        self.faults: deque[Fault] = deque()
        self._changed = threading.Condition()
        self._closed = False

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.requests.append((self.command, self.path, headers))
                answer = server._strike(self) if server.faults else server._checked(self)
                if answer is None:
                    self.close_connection = True
                    return
                status, body, more = answer
                self.send_response(status)
                for name, value in more.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = handle_one  # noqa: N815 - the names that http.server calls

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def take_away(self) -> None:
        """From now on there is a notice that this machine goes."""
        raise NotImplementedError

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _hold(self) -> None:
        """Until `close`."""
        with self._changed:
            self.held += 1
            self._changed.wait_for(lambda: self._closed, 600.0)
            self.held -= 1

    def _strike(self, request: BaseHTTPRequestHandler) -> "_Answer | None":
        fault = self.faults.popleft()
        if fault == HANG:
            self._hold()
        if isinstance(fault, str):
            return None
        return (fault, b"out of order", {}) if isinstance(fault, int) else (200, fault, {})

    def _checked(self, request: BaseHTTPRequestHandler) -> "_Answer":
        # All three refuse what a proxy hands on.
        if request.headers.get("X-Forwarded-For") is not None:
            return 403, b"", {}
        return self.answer(request.command, request.path, request.headers)

    def answer(self, method: str, path: str, headers: Any) -> "_Answer":
        raise NotImplementedError


_Answer = tuple[int, bytes, Mapping[str, str]]
_TOKEN, _TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"


class AwsServer(MetadataServer):
    """IMDSv2 of an instance with HttpTokens=required; `action` is that of the spot service.

    valid: the tokens that it knows.
    """

    def __init__(self) -> None:
        self.action: bytes | None = None
        self.valid: set[str] = set()
        self.is_enabled = True
        super().__init__()

    def take_away(self) -> None:
        self.interrupt()

    def interrupt(self, action: str = "terminate") -> None:
        self.action = json.dumps({"action": action, "time": "2031-09-18T08:22:00Z"}).encode()

    def answer(self, method: str, path: str, headers: Any) -> _Answer:
        if not self.is_enabled:
            return 403, b"", {}
        if path == "/latest/api/token":
            return self._new_token(method, headers)
        if headers.get(_TOKEN) not in self.valid:
            return 401, b"", {}
        if path == "/latest/meta-data/spot/instance-action" and self.action is not None:
            return 200, self.action, {"Content-Type": "application/json"}
        if path == "/latest/meta-data/events/recommendations/rebalance":
            return 200, b'{"noticeTime": "2031-09-18T08:00:00Z"}', {}
        return 404, b"", {}

    def _new_token(self, method: str, headers: Any) -> _Answer:
        asked = headers.get(_TTL) or ""
        if method != "PUT":
            return 405, b"", {}
        if not asked.isdecimal() or not 1 <= int(asked) <= 21600:
            return 400, b"", {}
        token = f"token-{len(self.valid)}=="
        self.valid.add(token)
        return 200, token.encode(), {_TTL: asked}


class GcpServer(MetadataServer):
    def __init__(self) -> None:
        self.is_preempted = False
        super().__init__()

    def take_away(self) -> None:
        self.is_preempted = True

    def answer(self, method: str, path: str, headers: Any) -> _Answer:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, b"Missing Metadata-Flavor:Google header.", {}
        flavor = {"Metadata-Flavor": "Google"}
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, b"", flavor
        return 200, b"TRUE" if self.is_preempted else b"FALSE", flavor


class AzureServer(MetadataServer):
    """`machine`: the name of this VM. `events`: those of all VMs of its group."""

    def __init__(self) -> None:
        self.machine = "trainers_3"
        self.events: list[dict[str, Any]] = []
        super().__init__()

    def take_away(self) -> None:
        self.schedule("Preempt", "other_1", self.machine.upper())

    def schedule(self, kind: str, *machines: str, not_before: str = "Mon, 19 Sep 2031 18:29:47 GMT") -> None:
        self.events.append(
            {
                "EventId": f"{len(self.events):08X}-0000-0000-0000-000000000000",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(machines),
                "EventStatus": "Scheduled" if not_before else "Started",
                "NotBefore": not_before,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )

    def answer(self, method: str, path: str, headers: Any) -> _Answer:
        where = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        if headers.get("Metadata") != "true" or "api-version" not in query:
            return 400, b'{"error": "Bad request. api-version is invalid or was not specified"}', {}
        if where.path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return 200, self.machine.encode(), {}
        if where.path == "/metadata/scheduledevents" and method == "GET":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode(), {}
        return 404, b"", {}


SERVERS: dict[str, type[MetadataServer]] = {"aws": AwsServer, "gcp": GcpServer, "azure": AzureServer}
