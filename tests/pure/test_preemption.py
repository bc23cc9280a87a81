"""A notice of each source is heard, nothing else is one, and no fault of a service goes further."""

import json
import threading
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elastic.agent import preemption
from elastic.agent.preemption import CLOUDS, Source, cloud_source, sources, watch
from elastic.config.options import Options

HANG = "hang"
TOKEN, AZURE = "X-aws-ec2-metadata-token", ("Metadata", "true")
WHEN = "Mon, 19 Sep 2031 18:29:47 GMT"


def events(*of_vms, not_before=WHEN):
    """What Azure says of each: the kind of event, and the VMs that it names."""
    found = [
        {"EventType": kind, "Resources": vms, "NotBefore": not_before, "EventStatus": "Scheduled"}
        for kind, *vms in of_vms
    ]
    return json.dumps({"DocumentIncarnation": 1, "Events": found}).encode()


OTHERS = events(("Preempt", "trainers_30"), ("Freeze", "trainers_3"), ("Reboot", "trainers_3"))

# Of each cloud: the requests of one look, each with the header that its service demands and the
# answer without a notice; the last answer with one; and the reason.
PAGES = {
    "aws": (
        ("PUT /latest/api/token", (f"{TOKEN}-ttl-seconds", "60"), b"token=="),
        ("GET /latest/meta-data/spot/instance-action", (TOKEN, "token=="), 404),
        json.dumps({"action": "terminate", "time": "2031-09-18T08:22:00Z"}).encode(),
        "AWS: terminate at 2031-09-18T08:22:00Z",
    ),
    "gcp": (
        ("GET /computeMetadata/v1/instance/preempted", ("Metadata-Flavor", "Google"), b"FALSE"),
        b"TRUE",
        "Google Cloud: preempted",
    ),
    "azure": (
        ("GET /metadata/instance/compute/name?api-version=2021-02-01&format=text", AZURE, b"trainers_3"),
        ("GET /metadata/scheduledevents?api-version=2020-07-01", AZURE, events()),
        events(("Preempt", "other_1", "TRAINERS_3")),
        f"Azure: Preempt, not before {WHEN}",
    ),
}


class Service:
    """The metadata service of a cloud. fault: the answer to the next request, whatever that asks
    for: an HTTP status, a body, or HANG until the end of the test.
    """

    def __init__(self, name):
        service, (*self.pages, self.notice, self.reason) = self, PAGES[name]
        self.name, self.asked, self.fault, self.is_over = name, [], None, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                service.asked.append(f"{self.command} {self.path}")
                pages = {asked: (header, answer) for asked, header, answer in service.pages}
                (header, value), answer = pages.get(service.asked[-1], (("", None), 404))
                answer = answer if self.headers.get(header) == value else 403
                answer = answer if service.fault is None else service.fault
                service.fault = None
                if answer == HANG:
                    service.is_over.wait(600)
                if not isinstance(answer, str):
                    self.send_response(answer if isinstance(answer, int) else 200)
                    self.end_headers()
                    self.wfile.write(answer if isinstance(answer, bytes) else b"out of order")

            do_PUT = do_GET  # noqa: N815 - a name that http.server calls

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def source(self, name=None):
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return cloud_source(name or self.name, {CLOUDS[name or self.name][1]: url})

    def says(self, answer):
        self.pages[-1] = (*self.pages[-1][:2], answer)

    def take_away(self):
        self.says(self.notice)


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(preemption, "ANSWER_S", 60.0)  # however busy the machine is
    services = []
    yield lambda name: services.append(Service(name)) or services[-1]
    for each in services:
        each.is_over.set()
        each.server.shutdown()
        each.server.server_close()


@pytest.mark.parametrize("name", CLOUDS)
def test_a_notice_of_each_cloud_asks_the_node_to_leave(name, serve, monkeypatch):
    """It comes after the first look; a proxy of the environment, which is nowhere, is not asked.
    Each look asks anew, and acknowledges nothing.
    """
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service, left = serve(name), []
    watch(service.source(), left.append, pytest.fail, lambda _seconds: service.take_away())
    assert left == [f"a notice ({service.reason}) asks this node to leave"]
    assert service.asked == 2 * [page for page, _, _ in service.pages]


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("fault", [404, b"\xff{garbage", HANG, b"x" * (2**20 + 1)])
def test_a_fault_of_a_service_is_no_notice_the_next_answer_is(fault, name, serve, monkeypatch):
    """Also where the notice has come meanwhile. A service that hangs may do so for 0.1 s."""
    service = serve(name)
    assert service.source().ask() is None
    with monkeypatch.context() as patched:
        if fault == HANG:
            patched.setattr(preemption, "ANSWER_S", 0.1)
        service.fault = fault
        with pytest.raises((OSError, ValueError, HTTPException)):
            service.source().ask()
    service.take_away()
    assert service.source().ask() == service.reason


def test_a_source_that_raises_is_asked_again():
    """The first call that asks the node to leave raises as well."""
    answers, left, said = [MemoryError("once"), None, OSError("again"), "notice", "notice"], [], []

    def ask():
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return found

    def leave(reason):
        left.append(reason)
        if len(left) == 1:
            raise RuntimeError("not yet")

    watch(Source(name="a file", ask=ask, every_s=0.1), leave, said.append, lambda _seconds: not answers)
    assert left == ["a notice (notice) asks this node to leave"] * 2
    assert len(said) == 1 and "MemoryError: once" in said[0]


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("azure", OTHERS, None),
        ("azure", events(("Terminate", "trainers_3"), not_before=""), "Azure: Terminate"),
        # A time that cannot be read hides no notice.
        ("azure", events(("Preempt", "trainers_3"), not_before=None), "Azure: Preempt"),
        ("aws", json.dumps({"action": "stop"}).encode(), "AWS: stop at an unknown time"),
    ],
)
def test_an_answer_is_a_notice_if_it_is_about_this_machine(name, answer, reason, serve):
    service = serve(name)
    service.says(answer)
    assert service.source().ask() == reason


def test_a_command_is_a_notice_where_it_exits_with_0(monkeypatch):
    """One that does not exist, and one that runs for too long, give no answer."""

    def ask(command):
        (source,) = sources(Options(recipe="r.py", run_dir="r", notice_command=command))
        return source.ask()

    assert (ask("true"), ask("false")) == ("true", None)
    monkeypatch.setattr(preemption, "COMMAND_S", 0.1)
    for command, says in (("/nowhere/at/all", "exits with 127"), ("sleep 10000", "longer than 0.1 s")):
        with pytest.raises((OSError, ValueError), match=says):
            ask(command)
