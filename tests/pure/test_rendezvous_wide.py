"""Wide groups: who watches whom, and what a version has that one node writes for others.

What goes wrong with requests happens to the nodes of test_random_storm.py.
"""

import json
from dataclasses import replace

import pytest
from group_storm import Storm
from hostile import spoiled
from hypothesis import given
from hypothesis import strategies as st

from elastic.rendezvous import group_writer, transitions
from elastic.rendezvous.group import ANY_RUN, Group, Node, SharedSettings
from elastic.rendezvous.group_writer import Verb, granted, request_text
from elastic.rendezvous.observer import ALL_WATCH_ALL, WATCHED, watched_by


def names_of(count):
    return [f"n{number:04d}" for number in range(count)]


@given(st.integers(1, 400), st.data())
def test_any_deaths_are_seen_by_some_node_that_lives(count, data):
    """Any nodes die at once: one that lives watches one of them, and then watches all."""
    nodes = frozenset(names_of(count))
    dead = data.draw(st.sets(st.sampled_from(sorted(nodes)), max_size=count - 1))
    assert not dead or any(watched_by(name, nodes) & dead for name in nodes - dead)


@pytest.mark.parametrize("count", [1, ALL_WATCH_ALL, ALL_WATCH_ALL + 1, 100, 1000])
def test_each_node_watches_few_and_is_watched_by_as_many(count):
    """In a small group all watch all."""
    nodes = frozenset(names_of(count))
    watches = [watched_by(name, nodes) for name in nodes]
    expected = count - 1 if count <= ALL_WATCH_ALL else WATCHED
    assert all(len(watched) == expected for watched in watches)
    assert all(sum(name in watched for watched in watches) == expected for name in nodes)
    assert not any(name in watched_by(name, nodes) for name in nodes)


texts = st.text(alphabet="abc-.: é", min_size=1, max_size=5)
who = st.sampled_from("abcdef-é")
nodes = st.builds(Node, id=who, address=texts, nproc=st.integers(0, 99), port=st.integers(0, 65535))
# A member of the open generation has workers: it asks to join once that is closed.
wished = st.tuples(st.sampled_from(Verb), st.integers(0, 3), nodes).filter(
    lambda each: each[0] is not Verb.JOIN or each[2].id not in "abc"
)


@given(st.lists(wished, max_size=8, unique_by=lambda each: each[2].id), st.sets(who), st.booleans())
def test_one_version_has_what_nodes_would_write_one_by_one(wishes, dead, is_member):
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


GROUP = Group(settings=SharedSettings(run=ANY_RUN, min_nodes=1, max_nodes=3, keep_alive_s=2.0))
WISH = request_text(Verb.JOIN, GROUP, Node(id="a", address="h", nproc=1))


@given(st.text(max_size=20) | spoiled(json.loads(WISH)).map(json.dumps))
def test_a_text_that_is_no_request_is_void(text):
    """Any process can write there; with a wrong node in the group, none could read it."""
    assert granted(GROUP, {"a": WISH}, dead=set()).waiting_ids == {"a"}
    assert granted(GROUP, {"b": WISH}, dead=set()) == GROUP
    found = granted(GROUP, {"a": text}, dead=set())
    assert Group.parse(found.to_json()) == found
    assert found.waiting_ids <= {"a"}


def test_a_newcomer_lets_no_node_go_that_may_be_the_last(monkeypatch):
    """A member asks to leave its state to the others, which are dead. It does not know that yet,
    and a node that has just come, to which all are alive, writes for others.
    """
    monkeypatch.setattr(group_writer, "COMBINES_FROM", 3)
    storm = Storm(1, 3)
    storm.sleep(10.0)
    leaver = storm.group.members[0]
    wish = request_text(Verb.WITHDRAW, storm.group, leaver)
    storm.machines[leaver.id].door.show(leaver.id, f"99 {wish}")
    for machine in storm.machines.values():
        machine.is_frozen = True
    new = storm.start()
    while new not in storm.group.waiting_ids:
        storm.sleep(0.01)
    assert storm.group.open and leaver.id in storm.group.member_ids
