"""A thousand machines of which one is taken away each second do not use up the run's restarts."""

from dataclasses import replace

import pytest

from elastic.rendezvous import transitions
from elastic.rendezvous.group import Group, Node, WorkerFailure
from elastic.rendezvous.membership import GroupPolicy

SIZE = 1000
SECONDS = 100
POLICY = GroupPolicy(min_nodes=1, max_nodes=SIZE, last_call_s=0.0, timeout_s=600.0)


def node(number: int) -> Node:
    return Node(id=f"spot-{number}", address=f"10.0.{number // 250}.{number % 250}", nproc=1)


def formed(group: Group, members: tuple[Node, ...]) -> Group:
    """The next generation, once `members` wait; all others are dead, and evicted."""
    alive = {n.id for n in members}
    group = transitions.evict(replace(group, waiting=members), alive=alive)
    return transitions.form(group, alive=alive, endpoint="x:1", policy=POLICY)


def closed(group: Group, *, by: str, step: int) -> Group:
    failure = WorkerFailure(node=by, rank=0, message="signal 9", traceback="")
    number, cause = group.generation, transitions.FAILURE
    return transitions.close(group, generation=number, cause=cause, step=step, counts=True, failure=failure)


@pytest.mark.parametrize("steps_between", [0, 1])
def test_a_storm_of_preemptions_uses_up_no_restart(steps_between):
    """Each machine that goes loses its workers before its agent, which counts that as a failure;
    another one takes its place.
    """
    members, step = tuple(node(i) for i in range(SIZE)), 0
    group = formed(Group(), members)
    for second in range(SECONDS):
        victim = members[second * 7 % SIZE]
        group = closed(group, by=victim.id, step=step)
        members = (*(n for n in members if n != victim), node(SIZE + second))
        group = formed(group, members)
        step += steps_between
        assert (group.restarts, group.cause, len(group.members)) == (0, transitions.NODE_LOST, SIZE)


def test_failures_of_a_recipe_count_between_preemptions():
    """A generation that failed by itself counts, whatever was lost in those around it."""
    members = tuple(node(i) for i in range(10))
    group = formed(Group(), members)
    for number in range(1, 4):
        group = formed(closed(group, by=members[0].id, step=0), members)
        assert (group.restarts, group.cause) == (number, transitions.FAILURE)
        group, members = closed(group, by=members[-1].id, step=0), members[:-1]
        group = formed(group, members)
        assert (group.restarts, group.cause) == (number, transitions.NODE_LOST)


def test_a_member_that_left_as_planned_explains_no_failure():
    members = tuple(node(i) for i in range(3))
    group = closed(formed(Group(), members), by=members[0].id, step=0)
    group = formed(transitions.leave(group, members[2].id), members[:2])
    assert (group.restarts, group.cause) == (1, transitions.FAILURE)
