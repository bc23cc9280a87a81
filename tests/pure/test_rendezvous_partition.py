"""Which nodes are excluded, against a twin that tries all choices; and datagrams of strangers."""

import itertools
import socket

import pytest
from gates import wait_for
from hypothesis import given
from hypothesis import strategies as st

from elastic.rendezvous.group import Node
from elastic.rendezvous.partition import UnreachableReport, nodes_to_exclude
from elastic.rendezvous.reachability import Probe, Probes
from elastic.system.clock import SystemClock

ORDER = tuple("abcdef")
who = st.sampled_from((*ORDER, "a stranger"))
peers = st.lists(who, unique=True, max_size=5).map(tuple)
reports = st.lists(st.builds(UnreachableReport, node=who, peers=peers), max_size=5)


def is_connected(left, found):
    """Whether no node of `left` has reported another node of `left`."""
    return not any(c.node in left and (set(c.peers) - {c.node}) & left for c in found)


@given(reports)
def test_nodes_that_stay_reach_each_other(found):
    """Any reports, also of strangers and of oneself: some nodes stay, and to put back any one
    excluded node would bring back a broken link.
    """
    gone = nodes_to_exclude(ORDER, found)
    stay = set(ORDER) - set(gone)
    assert stay and is_connected(stay, found)
    assert not any(is_connected(stay | {name}, found) for name in gone)


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_of_up_to_five_nodes_as_few_as_possible_are_excluded(names):
    """Every set of broken links, against a twin that tries all choices, the smallest first. Among
    them is the chain d-a-c-b-e, where c has as many broken links as a and b, and must stay.
    """
    pairs = list(itertools.combinations(names, 2))
    for chosen in itertools.product([False, True], repeat=len(pairs)):
        broken = [pair for pair, is_broken in zip(pairs, chosen, strict=True) if is_broken]
        found = [UnreachableReport(node=one, peers=(other,)) for one, other in broken]
        choices = itertools.chain.from_iterable(
            itertools.combinations(names, size) for size in range(len(names))
        )
        fewest = next(choice for choice in choices if all(set(choice) & set(pair) for pair in broken))
        assert len(nodes_to_exclude(names, found)) == len(fewest)


@pytest.fixture
def opened():
    found = []

    def make(name):
        found.append(Probes(name, "127.0.0.1", 0.01, SystemClock()))
        return found[-1]

    yield make
    for probes in found:
        probes.close()


def node(name, probes):
    return Node(id=name, address="127.0.0.1", nproc=1, port=probes.port)


def test_only_peers_that_receive_our_probes_are_counted(opened):
    """a and b probe each other. c probes a, which does not know it. d sends probes and receives
    none.
    """
    a, b, c = opened("a"), opened("b"), opened("c")
    a.set_peers([node("a", a), node("b", b)])
    b.set_peers([node("a", a), node("b", b)])
    c.set_peers([node("a", a)])
    wait_for(lambda: a.counters.get("b", 0) > 20 and b.counters.get("a", 0) > 20, "probes")
    assert set(a.counters) == {"b"} and c.counters == {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        a.set_peers([Node(id="d", address="127.0.0.1", nproc=1, port=deaf.getsockname()[1])])
        for _ in range(20):
            deaf.sendto(Probe(sender="d", receiver="a", hears=False).to_json(), ("127.0.0.1", a.port))
        while not Probe.parse(deaf.recv(1024)).hears:
            pass
    assert a.counters == {}


def test_malformed_and_forged_datagrams_do_no_harm(opened):
    """Datagrams that are too long, are not JSON, are for other nodes or come from unknown ones;
    then a real probe still counts. Another node publishes any address; the name of a host has no
    empty label.
    """
    a, b = opened("a"), opened("b")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"\xff" * 60000, b"[" * 60000, b"{}", b'{"sender":1,"receiver":2,"hears":3}'):
            stranger.sendto(data, ("127.0.0.1", a.port))
        for probe in (
            Probe(sender="z", receiver="a", hears=True),
            Probe(sender="b", receiver="z", hears=True),
        ):
            stranger.sendto(probe.to_json(), ("127.0.0.1", a.port))
    a.set_peers([Node(id="c", address="ä..host", nproc=1, port=1), node("b", b)])
    b.set_peers([node("a", a)])
    wait_for(lambda: a.counters, "a probe")
    assert set(a.counters) == {"b"}
