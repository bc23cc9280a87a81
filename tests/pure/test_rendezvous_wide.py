"""Wide groups: who watches whom, and how nodes combine their writes; requests that come late, of
nodes that died or left, that cannot be read, or get lost. In a twin each node watches all others
and writes for itself.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendezvous_world import POLL_S, WideBackend, World, parsed

from elastic.rendezvous import observer, transitions
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.group_writer import Verb, granted, request_text
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.observer import ALL_WATCH_ALL, WATCHED, watched_by
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.testing.fakes import FakeClock

KEEP_ALIVE_S = 2.0
POLICY = GroupPolicy(min_nodes=1, max_nodes=64, last_call_s=1.0, timeout_s=1e9)


def names_of(count: int) -> list[str]:
    return [f"n{number:04d}" for number in range(count)]


@given(st.integers(1, 400), st.data())
def test_any_deaths_are_seen_by_some_node_that_lives(count: int, data: st.DataObject) -> None:
    """Any nodes die at once: one that lives watches one of them, and then watches all."""
    nodes = frozenset(names_of(count))
    dead = data.draw(st.sets(st.sampled_from(sorted(nodes)), max_size=count - 1))
    assert not dead or any(watched_by(name, nodes) & dead for name in nodes - dead)


@pytest.mark.parametrize("count", [1, ALL_WATCH_ALL, ALL_WATCH_ALL + 1, 100, 1000])
def test_each_node_watches_few_and_is_watched_by_as_many(count: int) -> None:
    """In a small group all watch all."""
    nodes = frozenset(names_of(count))
    watches = [watched_by(name, nodes) for name in nodes]
    expected = count - 1 if count <= ALL_WATCH_ALL else WATCHED
    assert all(len(watched) == expected for watched in watches)
    assert all(sum(name in watched for watched in watches) == expected for name in nodes)
    assert not any(name in watched_by(name, nodes) for name in nodes)


ABOUT = request_text(Verb.JOIN, Group(), Node(id="a", address="a", nproc=1)).split()[1]
texts = st.text(alphabet="abc-.: é", min_size=1, max_size=5)
nodes = st.builds(Node, id=texts, address=texts, nproc=st.integers(0, 99), port=st.integers(0, 65535))
wished = st.tuples(st.sampled_from(Verb), st.integers(0, 3), nodes)


@given(st.lists(wished, max_size=8, unique_by=lambda each: each[2].id), st.sets(texts), st.booleans())
def test_one_version_has_what_nodes_would_write_one_by_one(
    wishes: list[tuple[Verb, int, Node]], dead: set[str], is_member: bool
) -> None:
    """The twin lets each live node make its own transition, in the order of names; what is wanted
    of another generation is void.
    """
    members = tuple(Node(id=name, address="::1", nproc=1) for name in ("a", "b", "c"))
    group = twin = Group(generation=1, open=True, endpoint="a:1", members=members)
    for verb, number, node in sorted(wishes, key=lambda each: each[2].id):
        if number != 1 or node.id in dead:
            continue
        if verb is Verb.JOIN:
            twin = transitions.join(twin, node)
        elif verb is Verb.DONE:
            twin = transitions.done(twin, generation=1, node_id=node.id)
        elif is_member:
            twin = transitions.withdraw(twin, node.id, alive=twin.member_ids - dead, is_shared=True)
    left = {
        node.id: request_text(verb, replace(group, generation=number), node) for verb, number, node in wishes
    }
    written = granted(group, left, dead=dead, is_member=is_member)
    assert written == twin
    assert granted(written, left, dead=dead, is_member=is_member) == written, "to ask twice is to ask once"


@given(st.text(max_size=20) | st.lists(st.text(max_size=4), max_size=8).map(" ".join))
def test_a_text_that_is_no_request_is_void(text: str) -> None:
    """Any process can write there."""
    assert granted(Group(), {"a": f"join {ABOUT} 1 0 a"}, dead=set()).waiting
    hostile = (
        "join 0 -1 0 a",
        f"join 0 1 {10**19} a",
        "end 0 1 0 a",
        "join 0 1 0",
        "join 0 1 65536 a",
        "join 0 1 0 a\tb",
    )
    for each in (text, *(line.replace(" 0", f" {ABOUT}", 1) for line in hostile)):
        assert granted(Group(), {"a": each}, dead=set()) == Group()


def world(count: int, combines_from: int = 17) -> World:
    made = World(policy=POLICY, keep_alive_s=KEEP_ALIVE_S, backend=WideBackend(combines_from))
    for name in names_of(count):
        made.start(name)
    return made


def until_open(made: World, members: Iterable[str], limit_s: float) -> float:
    """Seconds until a generation of exactly these members is open and all of them are in it."""
    began_s, wanted = made.clock.now, set(members)
    while True:
        machines = [made.machines[name] for name in wanted]
        numbers = {m.generation and m.generation.number for m in machines}
        if made.group.open and made.group.member_ids == wanted and numbers == {made.group.generation}:
            return made.clock.now - began_s
        assert made.clock.now - began_s <= limit_s, made.show()
        made.tick(POLL_S)


def test_fifty_nodes_that_start_at_once_write_few_versions() -> None:
    """Each alone would need one version, and 1,275 tries."""
    made = world(50)
    until_open(made, names_of(50), 10.0)
    assert isinstance(made.backend, WideBackend)
    assert len(made.backend.history()) <= 4
    assert made.backend.tries <= 12
    assert [n.id for n in made.group.members] == names_of(50), "neighbours have neighbouring ranks"


def watched_place(order: list[str], at: int) -> list[str]:
    """A node and all that watch it."""
    nodes = frozenset(order)
    return [order[at], *(name for name in order if order[at] in watched_by(name, nodes))]


LOSSES: dict[str, Callable[[list[str]], list[str]]] = {
    "one": lambda order: [order[17]],
    "the first tenth": lambda order: order[:5],
    "one with all that watch it": lambda order: watched_place(order, 9),
    "the first with all that watch it": lambda order: watched_place(order, 0),
    "all but one": lambda order: [*order[:29], *order[30:]],
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_wide_group_loses_nodes_as_its_twin_does(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the twin all nodes watch all and write themselves. Both end with the same members in the
    same order, one generation later, and where all that watch a node die with it the wide group
    takes half a keep-alive longer, and a wait to write.
    """
    times, lost = [], LOSSES[loss](names_of(50))
    for all_watch_all in (ALL_WATCH_ALL, 1000):
        monkeypatch.setattr(observer, "ALL_WATCH_ALL", all_watch_all)
        random.seed(1)
        made = world(0, all_watch_all + 1)
        for name in names_of(50):
            made.start(name)
            made.poll(name)
        until_open(made, names_of(50), 10.0)
        before = [n.id for n in made.group.members]
        for name in lost:
            made.kill(name)
        left = [name for name in before if name not in lost]
        times.append(until_open(made, left, 5 * KEEP_ALIVE_S))
        assert [n.id for n in made.group.members] == left, "rank order stays"
        assert made.group.generation == 2, "one failure costs one generation"
    assert times[0] <= times[1] + KEEP_ALIVE_S


class FaultyBackend(WideBackend):
    """reads: requests can be read. loses_answers: a request is left, and the node learns that it
    was not.
    """

    reads, loses_answers = True, False

    def request(self, node_id: str, text: str) -> None:
        super().request(node_id, text)
        if self.loses_answers and text:
            raise BackendFailed("no answer")

    def requests(self) -> dict[str, str]:
        if not self.reads:
            raise BackendFailed("the folder of requests cannot be read")
        return super().requests()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[World, FaultyBackend]]:
    """Makes groups in which three nodes are many, and each watches one."""
    monkeypatch.setattr(observer, "ALL_WATCH_ALL", 2)
    monkeypatch.setattr(observer, "WATCHED", 1)

    def made(names: str, min_nodes: int = 1) -> tuple[World, FaultyBackend]:
        backend = FaultyBackend()
        policy = GroupPolicy(min_nodes=min_nodes, max_nodes=8, last_call_s=1.0, timeout_s=60.0)
        few_nodes = World(policy=policy, keep_alive_s=KEEP_ALIVE_S, backend=backend)
        for name in names:
            few_nodes.start(name)
        return few_nodes, backend

    return made


Few = Callable[..., tuple[World, FaultyBackend]]


def wish(made: World, name: str, verb: Verb) -> str:
    """What this node would request of the group as it is now."""
    return request_text(verb, made.group, Node(id=name, address=name, nproc=1, port=1))


def test_nodes_that_cannot_read_requests_write_for_themselves(few: Few) -> None:
    """All else works, as with a folder of requests that belongs to another user."""
    made, backend = few("abcde")
    backend.reads = False
    made.tick(10.0)
    assert made.group.member_ids == set("abcde") and made.group.open
    made.leave("c")
    assert "c" not in made.group.member_ids


def test_a_request_whose_answer_was_lost_is_taken_back(few: Few) -> None:
    """The call fails and has left the request all the same."""
    made, backend = few("abc")
    backend.loses_answers = True
    made.tick(10.0)
    assert made.group.open and len(made.group.members) == 3
    assert backend.requests() == {}


def test_a_newcomer_lets_no_node_go_that_may_be_the_last(few: Few) -> None:
    """All members but one are dead. It asks to leave its state to them, before it knows, and a node
    that has just come, to which all are alive, writes for others.
    """
    made, backend = few("abcd")
    made.tick(10.0)
    for name in ("b", "c", "d"):
        made.kill(name)
    backend.request("a", wish(made, "a", Verb.WITHDRAW))
    made.machines["a"].is_frozen = True
    made.start("new")
    while "new" not in made.group.waiting_ids:
        made.clock.sleep(0.01)
        made.poll("new")
    assert made.group.open and "a" in made.group.member_ids


def test_the_request_of_a_dead_node_brings_it_back_once(few: Few) -> None:
    """It died when it had asked to join. The group waits for more nodes, and they come one by one:
    each is new, and knows nothing of that death.
    """
    made, backend = few("abc", min_nodes=9)
    made.tick(4.0)
    backend.request("dead", wish(made, "dead", Verb.JOIN))
    for name in ("d", "e", "f"):
        made.start(name)
        made.tick(5 * KEEP_ALIVE_S)
        assert "dead" not in made.group.waiting_ids
    there = ["dead" in parsed(value).waiting_ids for value in backend.history()]
    assert sum(now and not before for before, now in pairwise(there)) == 1
    assert backend.requests() == {}


@pytest.mark.parametrize("what", ["done", "leave"])
def test_nodes_that_can_leave_no_request_go_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for one on a full disk: each node writes for itself."""
    clock, request = FakeClock(), DirectoryBackend.request

    def full(backend: DirectoryBackend, node_id: str, text: str) -> None:
        if text:
            raise BackendFailed("no space")
        request(backend, node_id, text)

    monkeypatch.setattr(DirectoryBackend, "request", full)
    policy = GroupPolicy(min_nodes=2, max_nodes=17, last_call_s=0.0, timeout_s=600.0)
    made = [
        Rendezvous(
            DirectoryBackend(tmp_path, clock),
            Node(id=f"n{number}", address="h", nproc=1),
            policy,
            keep_alive_s=KEEP_ALIVE_S,
            clock=clock,
            open_endpoint=lambda: "h:1",
        )
        for number in range(2)
    ]
    left = list(made)
    for _ in range(1000):
        clock.sleep(0.1)
        for number, each in enumerate(made):
            each._backend.beat(f"n{number}")
        left = [each for each in left if each.poll_join() is None]
        if not left:
            break
    if what == "leave":
        assert made[1].leave().member_ids == {"n0"}
    else:
        assert [each.done().ended is not None for each in made] == [False, True]
