"""Events of nodes whose clocks are wrong show what those of right clocks would show."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged import logged

from elastic.observe.generations import generations
from elastic.observe.goodput import time_spent
from elastic.observe.logged_event import by_generation, in_order
from elastic.observe.one_clock import LAG_S, ahead_of_generations, ahead_s, moved
from elastic.observe.recovery import recoveries
from elastic.observe.step_columns import columns_of
from elastic.observe.step_line import StepLine
from elastic.system import clock

DAY_S = 86_400.0
NODES = ("a", "b", "c")


@st.composite
def histories(draw):
    """(events, lines) by one clock: each generation has some of the nodes, one more than before or
    one less, and any of them is that of rank 0.
    """
    pause = st.floats(0.01, LAG_S - 1)
    now, number, events, lines = 1e6, 0, [], []
    there = {draw(st.sampled_from(NODES))}
    for generation in range(1, draw(st.integers(2, 6))):
        there = there ^ {draw(st.sampled_from(NODES))} or there
        nodes = draw(st.permutations(sorted(there)))
        cause = "start" if generation == 1 else "failure"
        events.append(logged("generation_started", now, generation, nodes[0], nodes=nodes, cause=cause))
        for rank, node in enumerate(nodes):
            now += draw(pause) / len(nodes)
            events.append(logged("worker_started", now, generation, node, rank=rank))
        now += draw(pause)
        events.append(logged("restored", now, generation, nodes[0], lost_steps=0, last_step_s=None))
        for _ in range(draw(st.integers(0, 3))):
            now, number = now + 1.0, number + 1
            lines.append(StepLine(step=number, time=now, generation=generation, seconds=1.0))
        events.append(logged("first_step", now, generation, nodes[0], step=number))
        for node in nodes:
            now += draw(pause) / len(nodes)
            events.append(logged("generation_ended", now, generation, node, cause="x", step=number))
        now += draw(pause)
    return events, lines


def with_clocks(history, wrong_s):
    """As nodes write it whose clocks are wrong by so much, each in a file of its own."""
    events, lines = history
    shown = [replace(each, time=each.time + wrong_s[each.node]) for each in events]
    first = {each.generation: each.node for each in events if each.event.name == "generation_started"}
    steps = [replace(line, time=line.time + wrong_s[first[line.generation]]) for line in lines]
    return in_order(shown), steps


def by_one_clock(events, lines):
    found = moved(events, ahead_s(events))
    return found, columns_of(lines, ahead_of_generations(found))


@given(histories())
def test_right_clocks_are_left_alone(history):
    events, _ = with_clocks(history, dict.fromkeys(NODES, 0.0))
    assert moved(events, ahead_s(events)) is events


@given(histories(), st.lists(st.sampled_from([-DAY_S, 0.0, 3600.0, DAY_S]), min_size=3, max_size=3))
def test_no_phase_is_longer_than_the_run_of_wrong_clocks(history, wrong_s):
    took_s = history[0][-1].time - history[0][0].time
    events, trained = by_one_clock(*with_clocks(history, dict(zip(NODES, wrong_s, strict=True))))
    # A clock is known as well as the nodes of a generation agree on its start.
    most_s = took_s + 2 * LAG_S * len(NODES)
    spent = time_spent(begun := generations(events, trained))
    assert spent.wall_s <= most_s
    assert all(seconds >= 0 for seconds in spent.badput_s.values())
    for each in recoveries(begun):
        phases_s = each.detect_s, each.rendezvous_s, each.down_s, each.restore_s, each.first_step_s
        assert all(seconds is None or 0 <= seconds <= most_s for seconds in phases_s)
        assert each.total_s is None or each.total_s <= most_s


@given(histories(), st.floats(-DAY_S, DAY_S))
def test_generations_of_wrong_clocks_start_in_order(history, wrong_s):
    events, _ = with_clocks(history, {"a": 0.0, "b": wrong_s, "c": -wrong_s})
    found = by_generation(moved(events, ahead_s(events)))
    starts = [next(each for each in own if each.event.name == "generation_started") for own in found.values()]
    nodes = [{*start.event.nodes} for start in starts]
    for (before, its), (after, ours) in pairwise(zip(starts, nodes, strict=True)):
        assert before.time <= after.time + (2 * LAG_S if its & ours else 0.0)


@pytest.mark.parametrize("wrong_s", [-DAY_S, DAY_S])
def test_a_wrong_clock_of_the_other_node_moves_no_mark(wrong_s):
    """Rank 0 is on a; its node is lost, and b goes on alone."""
    lost = {"cause": "node lost", "nodes": ["b"]}
    events = [
        logged("generation_started", 100.0, 1, "a", cause="start", nodes=["a", "b"]),
        logged("worker_started", 100.0, 1, "b", rank=1),
        logged("restored", 102.0, 1, "a", lost_steps=0, last_step_s=None),
        logged("first_step", 103.0, 1, "a", step=1),
        logged("generation_ended", 110.0, 1, "b", cause="node lost", step=2),
        logged("generation_started", 111.0, 2, "b", **lost),
        logged("worker_started", 111.0, 2, "b", rank=0),
        logged("restored", 112.0, 2, "b", lost_steps=0, last_step_s=104.0),
        logged("first_step", 113.5, 2, "b", step=3),
    ]
    lines = [StepLine(step=n, time=t, generation=g, seconds=1.0) for n, t, g in
             ((1, 103.0, 1), (2, 104.0, 1), (3, 113.5, 2))]  # fmt: skip
    right, trained = by_one_clock(events, lines)
    shown = with_clocks((events, lines), {"a": 0.0, "b": wrong_s, "c": 0.0})
    found, steps = by_one_clock(*shown)
    assert [each.time for each in found] == [each.time for each in right]
    found, right = generations(found, steps), generations(right, trained)
    assert time_spent(found) == time_spent(right)
    assert recoveries(found) == recoveries(right)


def test_a_command_by_an_earlier_clock_begins_after_the_last():
    """The next command is given an hour later, on a node whose clock was set back a day."""
    events = [
        logged("generation_started", 100.0, 1, "a", cause="start", nodes=["a"]),
        logged("checkpoint_committed", 160.0, 1, "a", step=9),
        logged("generation_started", 3760.0 - DAY_S, 2, "b", cause="resume", nodes=["b"]),
        logged("checkpoint_committed", 3770.0 - DAY_S, 2, "b", step=19),
    ]
    found = moved(events, ahead_s(events))
    assert [each.time for each in found] == [100.0, 160.0, 160.0, 170.0]


def test_a_clock_that_is_set_moves_no_time_of_the_command(monkeypatch):
    before_s, real = clock.SystemClock.wall(), time.time
    monkeypatch.setattr(time, "time", lambda: real() - DAY_S)
    assert before_s <= clock.SystemClock.wall() < before_s + DAY_S / 2
