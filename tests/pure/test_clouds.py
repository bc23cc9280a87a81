"""A notice of each cloud is heard, nothing else is one, and no fault of a service goes further."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from metadata_servers import CLOSE, HANG, SERVERS, MetadataServer

from elastic.agent.clouds import metadata
from elastic.agent.clouds.metadata import NoAnswer
from elastic.agent.clouds.services import ADDRESS, CLOUDS
from elastic.agent.clouds.watch import (
    EVERY_S,
    LONGEST_PAUSE_S,
    OUTAGE_ASKS,
    open_cloud,
    pause_s,
    watch_cloud,
)
from elastic.errors import UsageError


@pytest.fixture
def serve() -> Iterator[Callable[[str], MetadataServer]]:
    servers = []

    def begin(name):
        servers.append(SERVERS[name]())
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """However busy the machine is."""
    monkeypatch.setattr(metadata, "ANSWER_S", 60.0)
    monkeypatch.setattr(metadata, "CONNECT_S", 60.0)


def cloud_at(name, server):
    address = server.address if name == "gcp" else server.url
    return open_cloud(name, {CLOUDS[name].variable: address})


def ask(cloud):
    return cloud.ask(cloud.url, None)


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
    assert ask(cloud) is None
    with monkeypatch.context() as patched:
        if fault == HANG:
            patched.setattr(metadata, "ANSWER_S", 0.1)
        for _ in range(2):
            server.faults.append(fault)
            with pytest.raises(NoAnswer):
                ask(cloud)
    server.take_away()
    assert ask(cloud) is not None


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


def test_aws_says_that_the_service_is_off_or_refuses_the_token(serve):
    server = serve("aws")
    cloud = cloud_at("aws", server)
    server.is_enabled = False
    with pytest.raises(NoAnswer, match="HTTP 403: the instance's metadata service is switched off"):
        ask(cloud)
    server.is_enabled = True
    server.faults.extend([b"token"])
    with pytest.raises(NoAnswer, match="HTTP 401"):
        ask(cloud)


def test_aws_says_what_a_container_needs_where_no_token_comes(serve, monkeypatch):
    server = serve("aws")
    server.faults.append(HANG)
    monkeypatch.setattr(metadata, "ANSWER_S", 0.1)
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s; for a container .* hop limit of 2"):
        ask(cloud_at("aws", server))


def test_aws_heeds_every_action_and_no_recommendation(serve):
    server = serve("aws")
    cloud = cloud_at("aws", server)
    assert ask(cloud) is None
    assert not any("rebalance" in path for _, path, _ in server.requests)
    for action in ("stop", "hibernate"):
        server.interrupt(action)
        assert ask(cloud) == f"{action} at 2031-09-18T08:22:00Z"


def test_azure_heeds_no_event_of_another_vm_and_none_that_leaves_this_one_where_it_is(serve):
    server = serve("azure")
    cloud = cloud_at("azure", server)
    server.schedule("Preempt", "trainers_30", "trainers")
    for kind in ("Freeze", "Reboot", "Redeploy"):
        server.schedule(kind, server.machine)
    assert ask(cloud) is None
    server.schedule("Terminate", server.machine, not_before="")
    assert ask(cloud) == "Terminate"
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
def test_azure_heeds_a_notice_beside_an_unreadable_event(event, serve):
    """Before and behind it. Alone it is no answer."""
    server = serve("azure")
    cloud = cloud_at("azure", server)
    server.events.append(event)
    with pytest.raises(NoAnswer, match="expected an event of scheduledevents"):
        ask(cloud)
    server.take_away()
    server.events.append(event)
    assert ask(cloud) == "Preempt, not before Mon, 19 Sep 2031 18:29:47 GMT"


@pytest.mark.parametrize("when", [None, 7, [], "x" * 201, "Mon\x1b[2J"])
def test_a_time_that_cannot_be_read_hides_no_notice(when, serve):
    azures, amazons = serve("azure"), serve("aws")
    azures.schedule("Preempt", azures.machine)
    azures.events[-1]["NotBefore"] = when
    assert ask(cloud_at("azure", azures)) == "Preempt"
    amazons.action = json.dumps({"action": "terminate", "time": when}).encode()
    assert ask(cloud_at("aws", amazons)) == "terminate at an unknown time"


def test_azure_waits_longer_for_its_first_answer():
    """The first request switches the events on."""
    limits, answers = [], iter([NoAnswer("HTTP 503"), None, None])

    def answer(_url, answer_s):
        limits.append(answer_s)
        if (found := next(answers)) is not None:
            raise found

    watch_cloud(replace(CLOUDS["azure"], ask=answer), pytest.fail, lambda _: None, Waits(3))
    assert limits == [130.0, 130.0, None]


@pytest.mark.parametrize(
    ("name", "text", "url"),
    [
        ("aws", "http://[fd00:ec2::254]/", "http://[fd00:ec2::254]:80"),
        ("gcp", "metadata.google.internal", "http://metadata.google.internal:80"),
        ("azure", "", ADDRESS),
    ],
)
def test_the_environment_may_name_another_address(name, text, url):
    assert open_cloud(name, {CLOUDS[name].variable: text}).url == url


@pytest.mark.parametrize(
    ("name", "text"), [("aws", "h:1"), ("aws", "https://h"), ("azure", "http://h/x"), ("gcp", "http://h")]
)
def test_an_address_that_is_none_is_refused(name, text):
    with pytest.raises(UsageError, match=rf"HOST\[:PORT\] in {CLOUDS[name].variable}, found '{text}'"):
        open_cloud(name, {CLOUDS[name].variable: text})
