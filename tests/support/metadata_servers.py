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
_Answer = tuple[int, bytes]
_TOKEN, _TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"


class MetadataServer:
    """`requests`: method and path of each, as they came. `take_away`: there is a notice from now
    on that this machine goes.
    """

    def __init__(self) -> None:
        server = self
        self.requests: list[tuple[str, str]] = []
        self.faults: deque[Fault] = deque()
        self._closed = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                server.requests.append((self.command, self.path))
                answer = server._strike() if server.faults else server._checked(self)
                if answer is not None:
                    self.send_response(answer[0])
                    self.end_headers()
                    self.wfile.write(answer[1])

            do_GET = do_PUT = do_POST = handle_one  # noqa: N815 - the names that http.server calls

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take_away(self) -> None:
        raise NotImplementedError

    def answer(self, method: str, path: str, headers: Any) -> _Answer:
        raise NotImplementedError

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _strike(self) -> _Answer | None:
        fault = self.faults.popleft()
        if fault == HANG:
            self._closed.wait(600.0)
        if isinstance(fault, str):
            return None
        return (fault, b"out of order") if isinstance(fault, int) else (200, fault)

    def _checked(self, request: BaseHTTPRequestHandler) -> _Answer:
        # All three refuse what a proxy hands on.
        if request.headers.get("X-Forwarded-For") is not None:
            return 403, b""
        return self.answer(request.command, request.path, request.headers)


class AwsServer(MetadataServer):
    """IMDSv2 of an instance with HttpTokens=required; `action` is that of the spot service.

    valid: the tokens that it knows.
    """

    def __init__(self) -> None:
        self.action: Mapping[str, Any] | None = None
        self.valid: set[str] = set()
        super().__init__()

    def take_away(self) -> None:
        self.action = {"action": "terminate", "time": "2031-09-18T08:22:00Z"}

    def answer(self, method: str, path: str, headers: Any) -> _Answer:
        if path == "/latest/api/token":
            return self._new_token(method, headers.get(_TTL) or "")
        if headers.get(_TOKEN) not in self.valid:
            return 401, b""
        if path == "/latest/meta-data/spot/instance-action" and self.action is not None:
            return 200, json.dumps(self.action).encode()
        return 404, b""

    def _new_token(self, method: str, lives_s: str) -> _Answer:
        if method != "PUT":
            return 405, b""
        if not lives_s.isdecimal() or not 1 <= int(lives_s) <= 21600:
            return 400, b""
        token = f"token-{len(self.valid)}=="
        self.valid.add(token)
        return 200, token.encode()


class GcpServer(MetadataServer):
    is_preempted = False

    def take_away(self) -> None:
        self.is_preempted = True

    def answer(self, method: str, path: str, headers: Any) -> _Answer:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, b"Missing Metadata-Flavor:Google header."
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, b""
        return 200, b"TRUE" if self.is_preempted else b"FALSE"


class AzureServer(MetadataServer):
    """`machine`: the name of this VM. `events`: those of all VMs of its group."""

    machine = "trainers_3"

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        super().__init__()

    def take_away(self) -> None:
        self.schedule("Preempt", "other_1", self.machine.upper())

    def schedule(self, kind: str, *machines: str, not_before: Any = "Mon, 19 Sep 2031 18:29:47 GMT") -> None:
        self.events.append(
            {
                "EventId": f"{len(self.events):08X}-0000-0000-0000-000000000000",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(machines),
                "EventStatus": "Scheduled" if not_before else "Started",
                "NotBefore": not_before,
                "DurationInSeconds": -1,
            }
        )

    def answer(self, method: str, path: str, headers: Any) -> _Answer:
        where = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        if headers.get("Metadata") != "true" or "api-version" not in query:
            return 400, b'{"error": "Bad request. api-version is invalid or was not specified"}'
        if where.path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return 200, self.machine.encode()
        if where.path == "/metadata/scheduledevents" and method == "GET":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode()
        return 404, b""


SERVERS: dict[str, type[MetadataServer]] = {"aws": AwsServer, "gcp": GcpServer, "azure": AzureServer}
