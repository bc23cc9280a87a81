"""A notice of each source is heard, nothing else is one, and no fault of a service goes further."""

from collections.abc import Callable, Iterator
from http.client import HTTPException

import pytest
from metadata_servers import CLOSE, HANG, SERVERS, MetadataServer

from elastic.agent import preemption
from elastic.agent.preemption import CLOUDS, Source, cloud_source, watch


@pytest.fixture
def serve(monkeypatch) -> Iterator[Callable[[str], MetadataServer]]:
    monkeypatch.setattr(preemption, "ANSWER_S", 60.0)  # however busy the machine is
    servers = []

    def begin(name):
        servers.append(SERVERS[name]())
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def source_at(name, server):
    return cloud_source(name, {CLOUDS[name][1]: server.url})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aws", "AWS: terminate at 2031-09-18T08:22:00Z"),
        ("gcp", "Google Cloud: preempted"),
        ("azure", "Azure: Preempt, not before Mon, 19 Sep 2031 18:29:47 GMT"),
    ],
)
def test_a_notice_of_each_cloud_asks_the_node_to_leave(name, reason, serve, monkeypatch):
    """It comes after the first look; a proxy of the environment, which is nowhere, is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server, left = serve(name), []
    watch(source_at(name, server), left.append, pytest.fail, lambda _seconds: server.take_away())
    assert left == [f"a notice ({reason}) asks this node to leave"]


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("fault", [503, b"\xff{garbage", b"", CLOSE, HANG, b"x" * (2**20 + 1)])
def test_a_fault_of_a_service_is_no_notice_the_next_answer_is(fault, name, serve, monkeypatch):
    """Also where the notice has come meanwhile. A service that hangs may do so for 0.1 s."""
    server = serve(name)
    assert source_at(name, server).ask() is None
    with monkeypatch.context() as patched:
        if fault == HANG:
            patched.setattr(preemption, "ANSWER_S", 0.1)
        server.faults.append(fault)
        with pytest.raises((OSError, ValueError, HTTPException)):
            source_at(name, server).ask()
    server.take_away()
    assert source_at(name, server).ask() is not None


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


def test_a_service_of_another_cloud_gives_no_answer(serve):
    for name in ("gcp", "azure"):
        with pytest.raises((ValueError, FileNotFoundError), match="HTTP 40"):
            source_at("aws", serve(name)).ask()


def test_azure_heeds_no_event_of_another_vm(serve):
    server = serve("azure")
    source = source_at("azure", server)
    server.schedule("Preempt", "trainers_30", "trainers")
    for kind in ("Freeze", "Reboot", "Redeploy"):
        server.schedule(kind, server.machine)
    assert source.ask() is None
    server.schedule("Terminate", server.machine, not_before="")
    assert source.ask() == "Azure: Terminate"
    assert all(method == "GET" for method, _ in server.requests)  # nothing is acknowledged


@pytest.mark.parametrize("when", [None, "x" * 201, "Mon\x1b[2J"])
def test_a_time_that_cannot_be_read_hides_no_notice(when, serve):
    azures, amazons = serve("azure"), serve("aws")
    azures.schedule("Preempt", azures.machine, not_before=when)
    assert source_at("azure", azures).ask() == "Azure: Preempt"
    amazons.action = {"action": "stop", "time": when}
    assert source_at("aws", amazons).ask() == "AWS: stop at an unknown time"
