"""A node that keeps coming and going waits longer each time, up to a bound."""

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


def test_a_node_that_never_was_here_is_admitted_at_once():
    backoff = RejoinBackoff().entered((node("good"),), step=5).observe([node("new")], now_s=7.0)
    assert backoff.admits([node("new")], now_s=7.0)


def test_each_visit_without_a_new_step_doubles_the_wait_up_to_a_bound():
    waits = [visits(count).wait_s("bad") for count in range(1, 12)]
    assert waits[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert waits[-1] == LONGEST_S
    assert visits(5).wait_s("good") == 0.0


def test_a_visit_that_brought_a_new_step_clears_the_backoff():
    assert visits(8, trains=True).wait_s("bad") == 0.0
    backoff = visits(3).entered((node("good"), node("bad", 9)), step=10).entered((node("good"),), step=11)
    assert backoff.wait_s("bad") == 0.0


def test_a_node_that_waited_for_its_backoff_is_admitted_with_all_others():
    newcomer = node("bad", 9)
    backoff = visits(2).observe([newcomer], now_s=100.0)
    assert not backoff.admits([newcomer], now_s=100.0 + 2 * FIRST_S - 0.1)
    assert backoff.observe([newcomer], now_s=102.0).admits([newcomer], now_s=100.0 + 2 * FIRST_S)
    assert backoff.admits([newcomer, node("bad", 10)], now_s=100.0 + 2 * FIRST_S)


def test_a_node_that_stopped_waiting_starts_again_from_zero():
    newcomer = node("bad", 9)
    backoff = visits(1).observe([newcomer], now_s=0.0).observe([], now_s=1.0).observe([newcomer], now_s=2.0)
    assert not backoff.admits([newcomer], now_s=FIRST_S)
    assert backoff.admits([newcomer], now_s=2.0 + FIRST_S)


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
