"""Who is cut off, against a twin that tries every way to leave nodes out; and datagrams that mean harm."""

import contextlib
import itertools
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.rendezvous.group import Node
from elastic.rendezvous.partition import UnreachableReport, nodes_to_exclude
from elastic.rendezvous.probes import Probe, Probes
from elastic.system.clock import SystemClock

ORDER = tuple("abcdef")
reports = st.lists(
    st.builds(
        UnreachableReport,
        node=st.sampled_from(ORDER),
        peers=st.lists(st.sampled_from(ORDER), unique=True, max_size=5).map(tuple),
    ),
    max_size=5,
)


def is_quiet(left, found):
    """Whether nobody of those left complains about another one who is left."""
    return not any(c.node in left and (set(c.peers) - {c.node}) & left for c in found)


@given(reports)
def test_those_who_stay_hear_each_other_and_nobody_went_for_nothing(found):
    """Any reports; with each one put back alone there would be a report again, and somebody stays."""
    gone = nodes_to_exclude(ORDER, found)
    stay = set(ORDER) - set(gone)
    assert stay and is_quiet(stay, found)
    assert not any(is_quiet(stay | {name}, found) for name in gone)


@given(st.sampled_from(ORDER), st.sets(st.sampled_from(ORDER)), st.booleans())
def test_one_cut_node_is_the_one_that_goes(victim, others, says_so):
    """Any two or more others complain about it, or it about them (it is deaf), or both."""
    others -= {victim}
    if len(others) < 2:
        others = set(ORDER) - {victim}
    found = [UnreachableReport(node=victim, peers=tuple(sorted(others)))]
    if not says_so:
        found = [UnreachableReport(node=other, peers=(victim,)) for other in others]
    assert nodes_to_exclude(ORDER, found) == (victim,)


@pytest.mark.parametrize("names", list(itertools.combinations("abc", 2)))
def test_of_two_the_first_in_order_stays(names):
    assert nodes_to_exclude(names, [UnreachableReport(node=names[0], peers=(names[1],))]) == (names[1],)
    assert nodes_to_exclude(names, [UnreachableReport(node=names[1], peers=(names[0],))]) == (names[1],)


def test_complaints_about_strangers_and_oneself_count_nothing():
    """By somebody who left, about somebody who left, about itself."""
    found = [UnreachableReport(node="x", peers=("a",)), UnreachableReport(node="a", peers=("y", "a"))]
    assert nodes_to_exclude(("a", "b"), found) == ()


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_datagram_is_a_call_or_nothing(data):
    """What strangers send."""
    probe = Probe.parse(data)
    assert probe is None or Probe.parse(probe.to_json()) == probe


@pytest.fixture
def opened():
    found = []

    def make(name):
        found.append(Probes(name, "127.0.0.1", 0.01, SystemClock()))
        return found[-1]

    yield make
    for calls in found:
        calls.close()


def node(name, calls):
    return Node(id=name, address="127.0.0.1", nproc=1, port=calls.port)


def test_two_hear_each_other_and_a_path_of_one_direction_is_none(opened):
    """a and b probe each other; c calls a, who does not know it; d hears b and is not heard."""
    a, b, c = opened("a"), opened("b"), opened("c")
    a.set_peers([node("a", a), node("b", b)])
    b.set_peers([node("a", a), node("b", b)])
    c.set_peers([node("a", a)])
    while not (a.counters.get("b", 0) > 20 and b.counters.get("a", 0) > 20):
        pass
    assert set(a.counters) == {"b"} and c.counters == {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        a.set_peers([Node(id="d", address="127.0.0.1", nproc=1, port=deaf.getsockname()[1])])
        for _ in range(20):
            deaf.sendto(Probe(sender="d", receiver="a", hears=False).to_json(), ("127.0.0.1", a.port))
        while not Probe.parse(deaf.recv(1024)).hears:
            pass
    assert a.counters == {}


def test_who_is_heard_again_is_told_before_that_counts_and_not_at_the_next_regular_call():
    """Regular calls are an hour apart: a node takes its report back with its own count, and by then the other one must know."""
    with (
        contextlib.closing(Probes("a", "127.0.0.1", 3600.0, SystemClock())) as calls,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        other.bind(("127.0.0.1", 0))
        calls.set_peers([Node(id="b", address="127.0.0.1", nproc=1, port=other.getsockname()[1])])
        for _ in range(2):
            other.sendto(Probe(sender="b", receiver="a", hears=True).to_json(), ("127.0.0.1", calls.port))
        while calls.counters.get("b", 0) < 2:
            pass
        other.setblocking(False)
        assert Probe.parse(other.recv(1024)) == Probe(sender="a", receiver="b", hears=True)
        with pytest.raises(BlockingIOError):  # one that is heard all the time waits for the regular probe
            other.recv(1024)


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
def test_whoever_calls_once_an_hour_ends_at_once(address):
    """An address of its own, and one that is not, behind which it listens on all."""
    Probes("a", address, 3600.0, SystemClock()).close()


def test_garbage_and_lies_do_not_end_the_calls(opened):
    """Datagrams that are too long, no JSON, meant for others, or from nobody that is known; then a real one still counts."""
    a, b = opened("a"), opened("b")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"\xff" * 60000, b"[" * 60000, b"{}", b'{"from":1,"to":2,"hears":3}'):
            stranger.sendto(data, ("127.0.0.1", a.port))
        for probe in (
            Probe(sender="z", receiver="a", hears=True),
            Probe(sender="b", receiver="z", hears=True),
        ):
            stranger.sendto(probe.to_json(), ("127.0.0.1", a.port))
    a.set_peers([node("b", b)])
    b.set_peers([node("a", a)])
    while not a.counters:
        pass
    assert set(a.counters) == {"b"}
