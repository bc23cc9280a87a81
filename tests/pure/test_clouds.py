"""A notice of each cloud is heard, nothing else is one, and no fault of a service goes further."""

import json
from collections.abc import Callable, Iterator

import pytest
from metadata_servers import CLOSE, HANG, SERVERS, Late, MetadataServer, Trickle

from elastic.agent.clouds import aws, azure, gcp, metadata
from elastic.agent.clouds.metadata import NoAnswer
from elastic.agent.clouds.watch import (
    EVERY_S,
    LONGEST_PAUSE_S,
    OUTAGE_ASKS,
    VARIABLES,
    metadata_address,
    open_cloud,
    pause_s,
    watch_cloud,
)
from elastic.errors import UsageError
from elastic.testing.fakes import FakeClock

CLOUDS = ["aws", "gcp", "azure"]


@pytest.fixture
def serve() -> Iterator[Callable[[str], MetadataServer]]:
    servers = []

    def begin(name):
        servers.append(SERVERS[name]())
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def limit(monkeypatch, seconds):
    """The longest silence of a service."""
    for module in (gcp, azure):
        monkeypatch.setattr(module, "ANSWER_S", seconds)
    monkeypatch.setattr(gcp, "WAIT_S", seconds)
    monkeypatch.setattr(
        metadata.MetadataService.ask, "__kwdefaults__", {"method": "GET", "answer_s": seconds}
    )
    monkeypatch.setattr(metadata, "CONNECT_S", 60.0)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """However busy the machine is."""
    limit(monkeypatch, 60.0)


def cloud_at(name, server, clock=None, report=pytest.fail):
    address = server.address if name == "gcp" else server.url
    return open_cloud(name, {VARIABLES[name]: address}, clock or FakeClock(), report)


class Waits:
    """As Event.wait; over after so many pauses."""

    def __init__(self, pauses, between=lambda: None):
        self.seconds = []
        self._left = pauses
        self._between = between

    def __call__(self, seconds):
        if seconds:
            self.seconds.append(seconds)
            self._between()
        return len(self.seconds) >= self._left


def watched(cloud, pauses, between=lambda: None):
    """What the agent is told and its console shows, and the pauses."""
    left, said, waits = [], [], Waits(pauses, between)
    watch_cloud(cloud, left.append, said.append, waits)
    return left, said, waits.seconds


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aws", "AWS (terminate at 2031-09-18T08:22:00Z)"),
        ("gcp", "Google Cloud (preempted)"),
        ("azure", "Azure (Preempt, not before Mon, 19 Sep 2031 18:29:47 GMT)"),
    ],
)
def test_a_notice_of_each_cloud_asks_the_node_to_leave(name, reason, serve, monkeypatch):
    """It comes after the first look; a proxy of the environment, which is nowhere, is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = serve(name)
    left, said, _ = watched(cloud_at(name, server), 10, server.take_away)
    assert left == [f"a notice of {reason} asks this node to leave"]
    assert said == []


@pytest.mark.parametrize("name", CLOUDS)
def test_a_notice_that_comes_when_it_is_over_asks_for_nothing(name, serve):
    server, left = serve(name), []
    server.take_away()
    answers = iter([False, True])
    watch_cloud(cloud_at(name, server), left.append, pytest.fail, lambda _: next(answers))
    assert left == []


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("fault", [429, 500, 503, b"\xff{garbage", b"", CLOSE, HANG, b"x" * (2**20 + 1)])
def test_a_fault_of_a_service_is_no_notice_and_the_next_answer_counts(fault, name, serve, monkeypatch):
    """Also where the notice has come meanwhile. A service that hangs may do so for 0.1 s."""
    server = serve(name)
    cloud = cloud_at(name, server)
    assert cloud.ask() is None
    with monkeypatch.context() as patched:
        if fault == HANG:
            limit(patched, 0.1)
        for _ in range(2):
            server.faults.append(fault)
            with pytest.raises(NoAnswer):
                cloud.ask()
    server.take_away()
    assert cloud.ask() is not None


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (b"", "no answer within 0.3 s"),
        (b"HTTP/1.1 200 OK\r\nX-Padding: ", "no (whole )?answer within 0.3 s"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", "no whole answer within 0.3 s"),
        (b"HTTP/1.1 200 OK\r\n\r\nTRUE", "no whole answer within 0.3 s"),
    ],
    ids=["status", "headers", "body", "body without a length"],
)
@pytest.mark.parametrize("name", CLOUDS)
def test_a_service_that_sends_a_byte_now_and_then_holds_no_request_beyond_its_limit(
    name, begin, says, serve, monkeypatch
):
    """Each byte comes long before the limit."""
    server = serve(name)
    cloud = cloud_at(name, server)
    assert cloud.ask() is None
    if name == "gcp":
        cloud._etag = None
    limit(monkeypatch, 0.3)
    server.faults.append(Trickle(begin))
    with pytest.raises(NoAnswer, match=says):
        cloud.ask()
    limit(monkeypatch, 60.0)
    server.take_away()
    assert cloud.ask() is not None


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_an_answer_may_take_longer_than_a_connection(name, serve, monkeypatch):
    """Azure's first one takes minutes."""
    server = serve(name)
    monkeypatch.setattr(metadata, "CONNECT_S", 0.5)
    answers = {
        "aws": b'{"action": "stop"}',
        "azure": b'{"Events": [{"EventType": "Preempt", "Resources": ["trainers_3"]}]}',
    }
    cloud = cloud_at(name, server)
    assert cloud.ask() is None
    server.faults.append(Late(1.0, answers[name]))
    assert cloud.ask() is not None


@pytest.mark.parametrize("name", CLOUDS)
def test_where_no_service_answers_at_the_start_one_sentence_says_so(name, serve):
    """The port is closed. It is asked again, less and less often, and answers at last."""
    server = serve(name)
    cloud = cloud_at(name, server)
    server.close()
    left, said, pauses = watched(cloud, 4)
    assert left == []
    (line,) = said
    assert line.startswith(
        f"the metadata service of {cloud.name} at {cloud.url} does not answer; is this one"
    )
    assert "no connection" in line
    assert line.endswith("training goes on")
    assert pauses == [pause_s(1), pause_s(2), pause_s(3), pause_s(4)]


@pytest.mark.parametrize("asked", CLOUDS)
@pytest.mark.parametrize("there", CLOUDS)
def test_the_service_of_another_cloud_at_the_same_address_is_none(asked, there, serve):
    """All three have the address 169.254.169.254."""
    if asked == there:
        return
    left, said, _ = watched(cloud_at(asked, serve(there)), 3)
    assert left == []
    assert len(said) == 1


def test_an_outage_is_reported_once_and_so_is_its_end(serve):
    """One failure alone is no news, three in a row are."""
    server = serve("aws")
    rounds = iter([1, 0, OUTAGE_ASKS + 4, 0, 0])

    def between():
        if not server.faults:
            server.faults.extend([503] * next(rounds, 0))

    _, said, pauses = watched(cloud_at("aws", server), OUTAGE_ASKS + 9, between)
    assert [("answers now" in line, "HTTP 503" in line) for line in said] == [(False, True), (True, False)]
    assert max(pauses) == LONGEST_PAUSE_S
    assert pauses[-1] == EVERY_S


def test_pauses_grow_to_a_bound_however_long_an_outage_lasts():
    pauses = [pause_s(failures) for failures in (0, 1, 2, 3, 10**9)]
    assert pauses == [EVERY_S, 2 * EVERY_S, 4 * EVERY_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_aws_renews_its_token_in_time_and_when_the_service_has_forgotten_it(serve):
    """By the service's own limit, at its half; 401 in between, as after a sleep."""
    server, clock = serve("aws"), FakeClock()
    server.granted_s = 600
    cloud = cloud_at("aws", server, clock)
    for seconds, tokens in ((0.0, 1), (299.0, 1), (2.0, 2)):
        clock.sleep(seconds)
        assert (cloud.ask(), server.tokens) == (None, tokens)
    server.valid.clear()
    assert (cloud.ask(), server.tokens) == (None, 3)


def test_aws_says_that_the_service_is_switched_off_or_refuses_new_tokens_too(serve):
    server = serve("aws")
    cloud = cloud_at("aws", server)
    server.is_enabled = False
    with pytest.raises(NoAnswer, match="HTTP 403: the instance's metadata service is switched off"):
        cloud.ask()
    server.is_enabled = True
    cloud.ask()
    server.faults.extend([401, b"token", 401])
    with pytest.raises(NoAnswer, match="HTTP 401"):
        cloud.ask()


def test_aws_says_what_a_container_needs_where_no_token_comes(serve, monkeypatch):
    server = serve("aws")
    server.faults.append(HANG)
    limit(monkeypatch, 0.1)
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s; for a container .* hop limit of 2"):
        cloud_at("aws", server).ask()


def test_aws_heeds_every_action_and_no_recommendation(serve):
    server = serve("aws")
    cloud = cloud_at("aws", server)
    assert cloud.ask() is None
    assert not any("rebalance" in path for _, path, _ in server.requests)
    for action in ("stop", "hibernate"):
        server.interrupt(action)
        assert cloud.ask() == f"{action} at 2031-09-18T08:22:00Z"


def test_gcp_holds_the_request_until_the_value_changes(serve, monkeypatch):
    """The first is answered at once. The second is held, for WAIT_S at most, and then TRUE."""
    server = serve("gcp")
    cloud = cloud_at("gcp", server)
    assert cloud.ask() is None
    assert server.waited_s == []
    monkeypatch.setattr(server, "wait_change", lambda *_: server.take_away())
    assert cloud.ask() == "preempted"
    assert server.waited_s == [str(gcp.WAIT_S)]


def test_azure_heeds_no_event_of_another_vm_and_none_that_leaves_this_one_where_it_is(serve):
    server = serve("azure")
    cloud = cloud_at("azure", server)
    server.schedule("Preempt", "trainers_30", "trainers")
    for kind in ("Freeze", "Reboot", "Redeploy"):
        server.schedule(kind, server.machine)
    assert cloud.ask() is None
    server.schedule("Terminate", server.machine, not_before="")
    assert cloud.ask() == "Terminate"
    assert all(method == "GET" for method, _, _ in server.requests)  # nothing is acknowledged


@pytest.mark.parametrize(
    "event",
    [
        None,
        "Preempt",
        [],
        {},
        {"EventType": "Preempt"},
        {"EventType": 7, "Resources": ["other_1"]},
        {"EventType": "Preempt", "Resources": None},
        {"EventType": "Preempt", "Resources": "trainers_3"},
        {"EventType": "Preempt", "Resources": [None]},
    ],
)
def test_azure_heeds_a_notice_beside_an_event_that_cannot_be_read(event, serve):
    """Before and behind it. Such events stay in the list for minutes, and are said once."""
    server, said = serve("azure"), []
    cloud = cloud_at("azure", server, report=said.append)
    server.events.append(event)
    assert (cloud.ask(), cloud.ask()) == (None, None)
    server.take_away()
    server.events.append(event)
    assert cloud.ask() == "Preempt, not before Mon, 19 Sep 2031 18:29:47 GMT"
    (line,) = said
    assert line.startswith("expected an event of scheduledevents")
    assert line.endswith("events of Azure that cannot be read are left out, the others count")


@pytest.mark.parametrize("when", [None, 7, [], "x" * 201, "Mon\x1b[2J"])
def test_a_time_that_cannot_be_read_hides_no_notice(when, serve):
    azures, amazons = serve("azure"), serve("aws")
    azures.schedule("Preempt", azures.machine)
    azures.events[-1]["NotBefore"] = when
    assert cloud_at("azure", azures).ask() == "Preempt"
    amazons.action = json.dumps({"action": "terminate", "time": when}).encode()
    assert cloud_at("aws", amazons).ask() == "terminate at an unknown time"


def test_azure_waits_longer_for_its_first_events(serve, monkeypatch):
    """The first request switches the events on."""
    server, limits = serve("azure"), []
    cloud = cloud_at("azure", server)
    ask = cloud._service.ask
    monkeypatch.setattr(
        cloud._service,
        "ask",
        lambda *a, answer_s, **k: limits.append(answer_s) or ask(*a, answer_s=answer_s, **k),
    )
    server.faults.extend([server.machine.encode(), 503])
    with pytest.raises(NoAnswer):
        cloud.ask()
    cloud.ask()
    cloud.ask()
    name, first, later = 60.0, azure.FIRST_ANSWER_S, 60.0
    assert limits == [name, first, first, later]


@pytest.mark.parametrize(
    ("name", "text", "url"),
    [
        ("aws", "http://[fd00:ec2::254]", "http://[fd00:ec2::254]:80"),
        ("aws", "https://h:1/", "https://h:1"),
        ("gcp", "metadata.google.internal", "http://metadata.google.internal:80"),
        ("azure", "", None),
    ],
)
def test_the_environment_may_name_another_address(name, text, url):
    assert metadata_address(name, {VARIABLES[name]: text}) == url


@pytest.mark.parametrize(
    ("name", "text"), [("aws", "h:1"), ("aws", "ftp://h"), ("azure", "http://h/x"), ("gcp", "http://h")]
)
def test_an_address_that_is_none_is_refused(name, text):
    with pytest.raises(UsageError, match=rf"HOST\[:PORT\] in {VARIABLES[name]}, found '{text}'"):
        metadata_address(name, {VARIABLES[name]: text})


def test_the_addresses_are_those_of_the_clouds():
    assert {aws.ADDRESS, gcp.ADDRESS, azure.ADDRESS} == {"http://169.254.169.254"}
    assert [open_cloud(name, {}, FakeClock(), pytest.fail).url for name in CLOUDS] == [
        "http://169.254.169.254"
    ] * 3
