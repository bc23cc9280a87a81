"""A node that keeps coming and going waits longer each time, up to a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.rejoin_backoff import FIRST_S, LONGEST_S, RejoinBackoff
from elastic.rendezvous.group import Node


def node(address: str, life: int = 0) -> Node:
    return Node(id=f"{address}-{life}", address=address, nproc=1)


def visits(count: int, *, trains: bool = False) -> RejoinBackoff:
    """`bad` joins and goes `count` times beside `good`, with a new step each time if it
    `trains`.
    """
    backoff, step = RejoinBackoff().entered((node("good"),), step=0), 10
    for life in range(count):
        backoff = backoff.entered((node("good"), node("bad", life)), step=step)
        step += trains
        backoff = backoff.entered((node("good"),), step=step)
    return backoff


def test_each_visit_without_a_step_doubles_the_wait():
    waits = [visits(count).wait_s("bad") for count in range(1, 12)]
    assert waits[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert waits[-1] == LONGEST_S
    assert visits(5).wait_s("good") == 0.0


def test_a_visit_that_brought_a_new_step_clears_the_backoff():
    assert visits(8, trains=True).wait_s("bad") == 0.0
    backoff = visits(3).entered((node("good"), node("bad", 9)), step=10).entered((node("good"),), step=11)
    assert backoff.wait_s("bad") == 0.0


def test_a_node_that_waited_for_its_backoff_is_admitted():
    """One that stopped waiting in between starts again from zero; a new one waits for nothing."""
    newcomer = node("bad", 9)
    backoff = visits(2).observe([newcomer], now_s=0.0).observe([], now_s=1.0).observe([newcomer], now_s=100.0)
    assert not backoff.admits([newcomer], now_s=100.0 + 2 * FIRST_S - 0.1)
    assert backoff.observe([newcomer], now_s=102.0).admits([newcomer], now_s=100.0 + 2 * FIRST_S)
    assert backoff.admits([newcomer, node("bad", 10)], now_s=100.0 + 2 * FIRST_S)
    assert backoff.admits([node("new")], now_s=100.0)


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.integers(0, 3)), max_size=20),
    st.sampled_from("abc"),
)
def test_no_node_waits_for_longer_than_the_bound(history, address):
    backoff, step = RejoinBackoff(), 0
    for life, (members, steps) in enumerate(history):
        step += steps
        backoff = backoff.entered(tuple(node(a, life) for a in sorted(members)), step=step)
    newcomer = node(address, 99)
    assert backoff.observe([newcomer], now_s=0.0).admits([newcomer], now_s=LONGEST_S)


def test_a_member_that_left_as_planned_waits_to_be_admitted():
    """However many steps it trained; a member that is lost comes back at once."""
    backoff = RejoinBackoff().entered((node("good"), node("spot")), step=1)
    assert backoff.entered((node("good"),), step=900, is_planned=True).wait_s("spot") == FIRST_S
    assert backoff.entered((node("good"),), step=900).wait_s("spot") == 0.0


def admission(arrivals_s: list[float], *, window_s: float, max_nodes: int | None = None) -> float:
    """When the group drains for nodes that arrive then, looked at forty times a second."""
    backoff = RejoinBackoff().entered((node("good"),), step=1)
    for tick in range(10_000):
        now_s = tick / 40
        come = [node(f"new{i}") for i, at_s in enumerate(arrivals_s) if at_s <= now_s]
        backoff = backoff.observe(come, now_s=now_s)
        if backoff.admits(come, now_s=now_s, window_s=window_s, max_nodes=max_nodes):
            return now_s
    raise AssertionError("they were never admitted")


@pytest.mark.parametrize(
    ("arrivals_s", "window_s", "max_nodes", "admitted_s"),
    [
        ([0.0, 0.3, 0.7], 0.5, None, 1.2),  # one drain for all
        ([0.0, 0.3, 0.9], 0.5, None, 0.8),
        ([0.0, 0.3, 0.9], 0.0, None, 0.0),
        ([i / 10 for i in range(1000)], 0.5, None, 5.0),  # ten windows at most
        ([0.0], 0.5, 2, 0.0),  # the last one that fits: nothing could come in its window
        ([0.0, 0.1], 0.5, 3, 0.1),
    ],
)
def test_nodes_that_come_together_are_let_in_together(arrivals_s, window_s, max_nodes, admitted_s):
    assert admission(arrivals_s, window_s=window_s, max_nodes=max_nodes) == admitted_s


def test_a_node_in_its_backoff_does_not_delay_the_others():
    backoff = visits(4).observe([node("bad", 9), node("new")], now_s=10.0)
    assert backoff.admits([node("bad", 9), node("new")], now_s=10.5, window_s=0.5)
