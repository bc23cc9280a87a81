"""A node that keeps coming and going waits longer each time, up to a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.group_client import FIRST_S, LONGEST_S, RejoinBackoff
from elastic.rendezvous.group import Node


def node(address: str, life: int = 0) -> Node:
    return Node(id=f"{address}-{life}", address=address, nproc=1)


def entered(*generations: tuple[int, str], is_planned: bool = False) -> RejoinBackoff:
    """Each with its first step and its members; every node has another id in each."""
    backoff = RejoinBackoff()
    for life, (step, members) in enumerate(generations):
        backoff.entered(tuple(node(a, life) for a in members.split()), step=step, is_planned=is_planned)
    return backoff


def test_each_visit_without_a_step_doubles_the_wait():
    """A new step clears it, and a member that leaves as planned waits once."""
    waits = [entered((0, "a"), *[(10, "bad"), (10, "a")] * count).wait_s("bad") for count in range(1, 12)]
    assert waits[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert waits[-1] == LONGEST_S
    trained = (0, "a"), *[(10, "bad"), (10, "a")] * 3, (10, "bad"), (11, "a")
    assert entered(*trained).wait_s("bad") == 0.0
    left = (1, "good spot"), (900, "good")
    assert (entered(*left, is_planned=True).wait_s("spot"), entered(*left).wait_s("spot")) == (FIRST_S, 0.0)


def test_a_node_that_waited_for_its_backoff_is_admitted():
    """One that stopped waiting in between starts again from zero; a new one waits for nothing, and
    for no other one.
    """
    backoff, newcomer = entered((0, "a"), *[(10, "bad"), (10, "a")] * 2), node("bad", 9)
    for now_s, waiting in ((0.0, [newcomer]), (1.0, []), (100.0, [newcomer])):
        backoff.observe(waiting, now_s=now_s)
    assert not backoff.admits([newcomer], now_s=100.0 + 2 * FIRST_S - 0.1)
    assert backoff.admits([node("new")], now_s=100.0)
    backoff.observe([newcomer, node("new")], now_s=102.0)
    assert backoff.admits([newcomer, node("new")], now_s=102.5, window_s=0.5)
    assert backoff.admits([newcomer], now_s=100.0 + 2 * FIRST_S)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", "a b", "b c", "a b c"])), max_size=20),
    st.sampled_from("abc"),
)
def test_no_node_waits_for_longer_than_the_bound(history, address):
    backoff, newcomer = entered(*sorted(history, key=lambda each: each[0])), node(address, 99)
    backoff.observe([newcomer], now_s=0.0)
    assert backoff.admits([newcomer], now_s=LONGEST_S)


def admission(arrivals_s: list[float], *, window_s: float, max_nodes: int | None = None) -> float:
    """When the group drains for nodes that arrive then, looked at forty times a second."""
    backoff = entered((1, "good"))
    for tick in range(10_000):
        now_s = tick / 40
        come = [node(f"new{i}") for i, at_s in enumerate(arrivals_s) if at_s <= now_s]
        backoff.observe(come, now_s=now_s)
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
