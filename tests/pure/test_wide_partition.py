"""A wide group, in which nodes probe few others, against a twin that knows every broken link.

The real detectors and probes of all nodes run on a simulated clock; a datagram arrives at once, or
never where the network is cut in its direction.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.rendezvous import membership
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.partition import (
    ALL_PAIRS,
    NEIGHBOURS,
    RINGS,
    UnreachableReport,
    broken_by_node,
    probe_graph,
)
from elastic.rendezvous.reachability import PartitionDetector, ProbeExchange

KEEP_ALIVE_S = 2.0
POLL_S = 0.05
FOUND_WITHIN_S = 1.75 * KEEP_ALIVE_S + 4 * POLL_S  # the probes of two nodes are not in step
WIDTH = 60


@dataclass
class Agent:
    probes: ProbeExchange
    detector: PartitionDetector
    due_s: float


@dataclass
class Network:
    """One open generation of `size` nodes; `cut` are the pairs (from, to) that lose all packets."""

    size: int
    seed: int = 0
    cut: set[tuple[str, str]] = field(default_factory=set)
    now_s: float = 100.0
    busy: set[str] = field(default_factory=set)  # these probe, and do not read the group
    sent: Counter = field(default_factory=Counter)

    def __post_init__(self):
        draw = random.Random(self.seed)
        self.names = [f"rack{i // 10}-host{i % 10}-{draw.getrandbits(32):08x}" for i in range(self.size)]
        nodes = tuple(Node(id=name, address=name, nproc=1, port=1) for name in self.names)
        self.group = Group(generation=1, open=True, members=nodes, endpoint="x:1")
        self.agents = {}
        for name in self.names:
            probes = ProbeExchange(name, KEEP_ALIVE_S / 8)
            detector = PartitionDetector(probes, name, KEEP_ALIVE_S)
            self.agents[name] = Agent(probes, detector, self.now_s + draw.random() * KEEP_ALIVE_S / 8)

    def run(self, seconds, until=lambda group: False):
        """Returns how long it took until `until(group)`, or None."""
        began_s = self.now_s
        while self.now_s - began_s < seconds:
            self.now_s += POLL_S
            for name, agent in self.agents.items():
                if self.now_s >= agent.due_s:
                    agent.due_s += agent.probes.interval_s
                    for probe, _ in agent.probes.due(self.now_s):
                        self.send(name, probe)
            for name, agent in self.agents.items():
                if name not in self.busy:
                    self.poll(agent)
            if until(self.group):
                return self.now_s - began_s
        return None

    def send(self, sender, probe):
        self.sent[sender] += 1
        if (sender, probe.receiver) in self.cut:
            return
        probes = self.agents[probe.receiver].probes
        answer = probes.answer(probe, self.now_s)
        if answer is not None:
            self.send(probe.receiver, answer[0])
        probes.count(probe)

    def poll(self, agent):
        agent.detector.observe(self.group, now_s=self.now_s)
        everyone = frozenset(self.names)
        self.group = agent.detector.with_own_report(
            self.group, alive=everyone, moving=everyone, step=1, now_s=self.now_s
        )

    def generations(self, apart):
        """Four generations without three nodes each, and without the `apart`, which wait."""
        nodes, draw = self.group.members, random.Random(self.seed)
        others = [node.id for node in nodes if node.id not in apart | self.busy]
        for _ in range(4):
            away = apart | set(draw.sample(others, 3))
            self.group = replace(
                self.group,
                generation=self.group.generation + 1,
                open=True,
                members=tuple(node for node in nodes if node.id not in away),
                waiting=tuple(node for node in nodes if node.id in away),
            )
            self.run(2 * KEEP_ALIVE_S)
            yield

    def excluded(self):
        return membership.excluded(self.group, alive=frozenset(self.names))

    def truly_excluded(self):
        """The dumb twin: it knows every broken link, and infers none."""
        pairs = {frozenset(pair) for pair in self.cut}
        broken = broken_by_node(UnreachableReport(node=min(pair), peers=(max(pair),)) for pair in pairs)
        left, gone = list(self.names), set()
        while left:
            first = min(left, key=lambda name: len(broken.get(name, set()) & set(left)))
            gone |= broken.get(first, set()) & set(left)
            left = [name for name in left if name != first and name not in gone]
        return frozenset(gone)


def apart(*parts):
    """All links between nodes of different parts, in both directions."""
    return {pair for one, other in itertools.permutations(parts, 2) for pair in itertools.product(one, other)}


def half(names, draw):
    return names[: len(names) // 2], names[len(names) // 2 :]


def deaf(names, draw, size):
    chosen = draw.sample(names, size)
    return {(other, name) for name in chosen for other in names if other != name}


CUTS = {
    "three parts": lambda names, draw: apart(names[::3], names[1::3], names[2::3]),
    "ten nodes, each by itself": lambda names, draw: apart(
        *([n] for n in names[5::10]), [n for i, n in enumerate(names) if i % 10 != 5]
    ),
    "rank 0": lambda names, draw: apart(names[:1], names[1:]),
    "five mute nodes": lambda names, draw: {(b, a) for a, b in deaf(names, draw, 5)},
    "one direction between halves": lambda names, draw: set(itertools.product(*half(names, draw))),
}


@pytest.mark.parametrize("kind", CUTS)
def test_a_wide_group_excludes_the_nodes_that_a_twin_does(kind):
    """Sixty nodes, of which each probes sixteen: cut, they are excluded in the same time
    as where all pairs probe each other.
    """
    network = Network(WIDTH, seed=len(kind))
    network.run(KEEP_ALIVE_S)
    assert not network.group.reports
    network.cut = CUTS[kind](network.names, random.Random(len(kind)))
    took_s = network.run(3 * KEEP_ALIVE_S, until=lambda group: not group.open)
    assert took_s is not None and took_s <= FOUND_WITHIN_S
    network.run(2 * POLL_S)
    assert network.excluded() == network.truly_excluded()


@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.integers(2, ALL_PAIRS))
def test_in_a_small_group_any_cut_excludes_what_all_links_say(data, size):
    """Up to 32 nodes and any set of broken links, in one direction or both."""
    network = Network(size, seed=size)
    network.run(KEEP_ALIVE_S)
    pairs = list(itertools.permutations(network.names, 2))
    network.cut = set(data.draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True)))
    took_s = network.run(3 * KEEP_ALIVE_S, until=lambda group: not group.open)
    assert took_s is not None and took_s <= FOUND_WITHIN_S
    network.run(KEEP_ALIVE_S / 2)
    assert network.excluded() == network.truly_excluded()


@pytest.mark.parametrize("size", [11, 60])
def test_no_node_sends_more_than_fifty_datagrams_a_second(size):
    """With the default keep-alive, while nothing is wrong; a small group probes as it did."""
    network = Network(size)
    network.run(KEEP_ALIVE_S)
    network.sent.clear()
    network.run(4 * KEEP_ALIVE_S)
    most = max(network.sent.values()) / (4 * KEEP_ALIVE_S)
    assert most <= 50
    if size <= 11:
        assert min(network.sent.values()) / (4 * KEEP_ALIVE_S) >= 3.9 * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 17, 32, 33, 1200])
def test_peers_are_few_and_each_is_a_peer_of_its_peers(size):
    graph = probe_graph(frozenset(f"n{number}" for number in range(size)))
    for name, peers in graph.items():
        assert name not in peers and len(peers) < max(ALL_PAIRS, 2 * RINGS * NEIGHBOURS + 1)
        assert len(peers) >= min(size - 1, NEIGHBOURS)
        assert all(name in graph[other] for other in peers)


def test_nodes_that_a_cut_off_node_reports_are_not_excluded():
    """Generations follow each other, each with another graph of probes. Nodes that were not probed
    for a while are again; their silence begins then.
    """
    network, draw = Network(40, seed=1), random.Random(1)
    network.run(2 * KEEP_ALIVE_S)
    cut_off = draw.choice(network.names)
    network.cut = apart([cut_off], [name for name in network.names if name != cut_off])
    network.run(3 * KEEP_ALIVE_S, until=lambda group: not group.open)
    network.run(KEEP_ALIVE_S)
    for _ in network.generations({cut_off}):
        links = {frozenset((report.node, peer)) for report in network.group.reports for peer in report.peers}
        assert links and all(cut_off in link for link in links)


def test_a_node_that_saves_is_not_taken_for_cut_off():
    """The others become its peers or cease to be, without its knowing."""
    network, draw = Network(40, seed=1), random.Random(1)
    network.run(2 * KEEP_ALIVE_S)
    network.busy = set(draw.sample(network.names, 2))
    for _ in network.generations(set()):
        assert not network.group.reports
