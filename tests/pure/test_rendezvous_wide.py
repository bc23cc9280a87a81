"""Wide groups: who watches whom, how nodes combine their writes, and a twin of which each node
watches all others and writes for itself.
"""

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_world import POLL_S, WideBackend, World, other_settings, parsed

from elastic.rendezvous import observer, requests, transitions
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.observer import ALL_WATCH_ALL, WATCHED, watched_by
from elastic.rendezvous.requests import Request, Verb, settings_digest

KEEP_ALIVE_S = 2.0
POLICY = GroupPolicy(min_nodes=1, max_nodes=64, last_call_s=1.0, timeout_s=1e9)


def node(name: str, **fields: int) -> Node:
    return Node(id=name, address="::1", **({"nproc": 1} | fields))


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


def test_a_node_that_the_group_does_not_name_watches_its_place() -> None:
    """It takes the place in the ring that it will have, and who watches whom there stays."""
    nodes = frozenset(names_of(60))
    assert watched_by("spare", nodes) == watched_by("spare", nodes | {"spare"})


NONE = settings_digest(None)
texts = st.text(alphabet="abc-.: é", min_size=1, max_size=5)
wished = st.builds(
    Request,
    verb=st.sampled_from(Verb),
    node=st.builds(Node, id=texts, address=texts, nproc=st.integers(0, 99), port=st.integers(0, 65535)),
    generation=st.integers(0, 3),
    settings=st.sampled_from([NONE, "0badc0de"]),
)


@given(wished, st.integers(0, 3))
def test_a_request_reads_back_for_its_settings_and_generation_alone(
    request: Request, generation: int
) -> None:
    """The group may be in another generation than the one that it was left in, or another run's."""
    found = Request.parse(request.node.id, request.text, Group(generation=generation))
    is_about = generation == request.generation and request.settings == NONE
    assert found == (request if is_about else None)


@pytest.mark.parametrize("words", [["run=2"], ["uid=2"], ["min=2"], ["max=7"], ["keep_alive=3"]], ids=str)
def test_a_request_is_void_once_nodes_with_other_settings_have_the_group(words: list[str]) -> None:
    """They take it over with its number of generations. A node that they refuse has requested to
    join, and stands still while they come.
    """
    made = world(3, combines_from=2)
    made.tick(10.0)
    made.start("late")
    while "late" not in made.backend.requests():
        made.poll("late")
    assert "late" not in made.group.waiting_ids
    for name in list(made.machines):
        made.kill(name)
    made.start("stranger", other_settings(made.settings, words))
    for name in ("z1", "z2", "z3"):
        made.start(name, other_settings(made.settings, words))
    made.tick(20.0)
    assert made.group.open and made.group.member_ids == {"stranger", "z1", "z2", "z3"}
    assert all("late" not in parsed(value).waiting_ids for value in made.backend.history())


@given(st.text(max_size=20) | st.lists(st.text(max_size=4), max_size=8).map(" ".join))
def test_a_text_that_is_no_request_is_none(text: str) -> None:
    """Anyone can write there."""
    assert Request.parse("a", text, Group()) is None
    for hostile in (
        f"join 0 {NONE} -1 0 a",
        f"join 0 {NONE} 1 {10**19} a",
        f"end 0 {NONE} 1 0 a",
        f"join 0 {NONE} 1 0",
        f"join 0 {NONE} 1 65536 a",
        f"join 0 {NONE} 1 0 a\tb",
    ):
        assert Request.parse("a", hostile, Group()) is None


@given(st.lists(wished, max_size=8, unique_by=lambda each: each.node.id), st.sets(texts))
def test_one_version_has_what_the_nodes_would_have_written_one_by_one(
    wishes: list[Request], dead: set[str]
) -> None:
    """The twin lets each live node make its own transition, in the order of names."""
    group = Group(generation=1, members=tuple(node(name) for name in ("a", "b", "c")))
    twin = group
    for wish in sorted(wishes, key=lambda each: each.node.id):
        name = wish.node.id
        if wish.generation != 1 or wish.settings != NONE or name in dead:
            continue
        if wish.verb is Verb.JOIN:
            twin = transitions.join(twin, wish.node)
        elif wish.verb is Verb.DONE:
            twin = transitions.done(twin, generation=1, node_id=name)
        elif wish.verb is Verb.LEAVE:
            twin = transitions.leave(twin, name)
        else:
            shared = wish.verb is Verb.WITHDRAW_SHARED
            twin = transitions.withdraw(twin, name, alive=twin.member_ids - dead, is_shared=shared)
    written = requests.apply_all(group, wishes, dead=dead)
    assert written == twin
    assert requests.apply_all(written, wishes, dead=dead) == written, "to ask twice is to ask once"


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
    "the first": lambda order: [order[0]],
    "the first tenth": lambda order: order[:5],
    "a tenth in the middle": lambda order: order[20:25],
    "one with all that watch it": lambda order: watched_place(order, 9),
    "the first with all that watch it": lambda order: watched_place(order, 0),
    "half": lambda order: order[::2],
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


@given(st.integers(0, 2**32), st.sampled_from([20, 35, 50]))
@settings(max_examples=4)
def test_a_wide_group_survives_a_random_storm(seed: int, count: int) -> None:
    """Nodes die, come and leave, writers die in the middle of a write, answers are lost, listings
    are old. Then it is calm: all that live are in one generation, and numbers only grew.
    """
    random.seed(seed)
    made = world(count)
    backend = made.backend
    assert isinstance(backend, WideBackend)
    started = count
    for _ in range(12):
        event = random.choice(["kill", "ring", "start", "leave", "dies", "lost", "old", "fail", "calm"])
        live = [name for name, m in made.running.items() if not m.is_leaving]
        inside = [name for name in live if made.machines[name].generation is not None]
        if event == "kill":
            for name in random.sample(live, min(max(0, len(live) - 1), random.choice([1, 2, count // 10]))):
                made.kill(name)
        elif event == "ring" and len(live) > 2 * WATCHED:
            for name in watched_place(live, 0):
                made.machines.pop(name, None)
        elif event == "start" and len(live) < POLICY.max_nodes:
            started += 1
            made.start(f"x{started}")
        elif event == "leave" and len(live) > 1:
            made.leave(live[-1])
        elif event == "fail" and inside:
            made.fail(inside[0], step=1)
        elif event == "dies":
            backend.dies = random.choice(["before", "after"])
        elif event == "lost":
            backend.lost_answers = 2
        elif event == "old":
            backend.old_requests = backend.requests()
        made.tick(random.choice([POLL_S, 1.0, 3.0]))
    backend.dies, backend.lost_answers, backend.old_requests = "", 0, None
    if not made.running:
        return
    made.tick(8 * KEEP_ALIVE_S + transitions.restart_pause_s(made.group))
    assert made.group.open and made.group.member_ids == set(made.running)
    numbers = [Group.parse(value).generation for value in backend.history()]
    assert numbers == sorted(numbers)
