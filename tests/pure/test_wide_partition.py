"""Groups whose network is cut, against a twin that knows every broken link; and what probes cost.

The nodes are those of the storms: the real detectors and probes on one simulated clock.
"""

import itertools
import random

import pytest
from group_storm import KEEP_ALIVE_S, POLL_S, Storm
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.rendezvous.group import Node
from elastic.rendezvous.partition import ALL_PAIRS, STEPS, UnreachableReport, broken_by_node, probe_graph
from elastic.rendezvous.reachability import ProbeExchange

FOUND_WITHIN_S = 1.75 * KEEP_ALIVE_S + 4 * POLL_S  # polls and probes of two nodes are not in step


def apart(*parts):
    """All links between nodes of different parts, in both directions."""
    return {pair for one, other in itertools.permutations(parts, 2) for pair in itertools.product(one, other)}


CUTS = {
    "three nodes alone": lambda names: apart(names[:-3], *([name] for name in names[-3:])),
    "one direction between three parts": lambda names: {
        (one, other) for one, other in apart(names[::3], names[1::3], names[2::3]) if one < other
    },
}


def check_cut(size, cut_of):
    """The group excludes in time those that the twin does."""
    storm = Storm(size, size)
    storm.sleep(5.0)
    names, number = [node.id for node in storm.group.members], storm.group.generation
    assert len(names) == size and not storm.group.reports
    storm.network.cut = cut_of(names)
    storm.sleep(FOUND_WITHIN_S)
    assert not storm.group.open or storm.group.generation > number
    storm.sleep(2 * KEEP_ALIVE_S)
    pairs = {frozenset(pair) for pair in storm.network.cut}
    broken = broken_by_node(UnreachableReport(node=min(pair), peers=(max(pair),)) for pair in pairs)
    left, gone = names, set()
    while left:
        first = min(left, key=lambda name: len(broken.get(name, set()) & set(left)))
        gone |= broken.get(first, set()) & set(left)
        left = [name for name in left if name != first and name not in gone]
    assert storm.group.member_ids == set(names) - gone


@pytest.mark.parametrize("kind", CUTS)
def test_a_wide_group_excludes_the_nodes_that_a_twin_does(kind):
    """Each node probes sixteen others: cut, they are excluded in the same time as where all pairs
    probe each other.
    """
    check_cut(ALL_PAIRS + 2, CUTS[kind])


@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.integers(2, 8))
def test_in_a_small_group_any_cut_excludes_what_all_links_say(data, size):
    """Any set of broken links, in one direction or both."""

    def cut_of(names):
        pairs = list(itertools.permutations(names, 2))
        return set(data.draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True)))

    check_cut(size, cut_of)


@pytest.mark.parametrize("is_cut", [True, False])
def test_as_a_wide_group_changes_no_whole_link_is_reported(is_cut):
    """A node is cut off, or two save and do not read the group, while others die. Nodes that were
    not probed for a while are again; their silence begins then.
    """
    storm, draw = Storm(1, ALL_PAIRS + 8), random.Random(1)
    storm.sleep(5.0)
    chosen = draw.sample(sorted(storm.machines), 2)
    others = sorted(set(storm.machines) - set(chosen))
    if is_cut:
        storm.network.cut = apart(chosen[:1], others + chosen[1:])
    else:
        for name in chosen:
            storm.machines[name].is_busy = True
    storm.sleep(3 * KEEP_ALIVE_S)
    for _ in range(2):
        for _ in range(3):
            del storm.machines[others.pop(draw.randrange(len(others)))]
        storm.sleep(2.5 * KEEP_ALIVE_S)
        links = {(report.node, peer) for report in storm.group.reports for peer in report.peers}
        assert bool(links) == is_cut and all(chosen[0] in link for link in links)


@pytest.mark.parametrize("count", [10, 2 * len(STEPS), ALL_PAIRS - 1])
def test_no_node_sends_more_than_fifty_datagrams_a_second(count):
    """With the default keep-alive, while nothing is wrong; four to each peer of a few."""
    probes = ProbeExchange("a", KEEP_ALIVE_S / 8)
    probes.set_peers([Node(id=f"n{i}", address="h", nproc=1, port=1) for i in range(count)])
    rate = len(probes.due(0.0)) / probes.interval_s
    assert rate <= 50 and (count > 10 or rate == 4 * count)


@pytest.mark.parametrize("size", [1, 2, 17, ALL_PAIRS, ALL_PAIRS + 1, 1200])
def test_peers_are_few_and_each_is_a_peer_of_its_peers(size):
    graph = probe_graph(frozenset(f"n{number}" for number in range(size)))
    for name, peers in graph.items():
        assert name not in peers and all(name in graph[other] for other in peers)
        assert len(peers) == (size - 1 if size <= ALL_PAIRS else 2 * len(STEPS))
