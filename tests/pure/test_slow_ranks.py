"""A rank is named when it is slower than noise explains, and no rank of equals is."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged
from steps import NoPage

from elastic.observe import step_columns
from elastic.observe.step_columns import columns_of, slow_ranks
from elastic.observe.step_line import StepLine, parse
from elastic.reduce.tree import span
from elastic.testing.fakes import FakeClock
from elastic.train.loop.record import slowest_of
from elastic.train.step.parts import Pace
from elastic.worker.heartbeat import HeartbeatSender


def line(step, own_s, generation=1, shards=None):
    """Of a step whose ranks worked so long; it takes as long as the slowest."""
    fields = slowest_of(own_s, shards or [1] * len(own_s))
    return StepLine(step=step, generation=generation, world_size=len(own_s), seconds=max(own_s), **fields)


def costs_s(lines):
    return step_columns.costs_s(columns_of(lines))


@given(st.integers(1, 16), st.integers(0, 2**32), st.floats(0.0, 0.5))
@settings(max_examples=50)
def test_of_equal_ranks_none_is_named(ranks, seed, noise):
    draw = random.Random(seed)
    lines = [line(n, [1.0 + noise * draw.random() for _ in range(ranks)]) for n in range(1, 400)]
    assert costs_s(lines) == {}


@given(st.integers(2, 8), st.integers(0, 2**32), st.data())
@settings(max_examples=50)
def test_a_rank_that_is_a_third_slower_is_named_with_its_cost(ranks, seed, data):
    """Noise of a tenth. The others wait a third of a second in each of 200 steps, about."""
    draw, slow = random.Random(seed), data.draw(st.integers(0, ranks - 1))
    lines = [
        line(n, [(4 / 3 if rank == slow else 1.0) + 0.1 * draw.random() for rank in range(ranks)])
        for n in range(1, 201)
    ]
    found = costs_s(lines)
    assert found.keys() == {slow}
    assert found[slow] == pytest.approx(200 / 3, rel=0.15)


def test_a_rank_is_named_with_its_node_of_that_generation():
    """In generation 2 rank 1 is on another node, and is as fast as the others."""
    started = [
        logged("worker_started", 1.0, generation, node, rank=rank, pid=7)
        for generation, rank, node in [(1, 0, "a"), (1, 1, "b"), (2, 0, "a"), (2, 1, "c")]
    ]
    lines = [line(n, [1.0, 2.0]) for n in range(1, 101)]
    lines += [line(n, [1.0, 1.001] if n % 2 else [1.001, 1.0], 2) for n in range(101, 201)]
    (found,) = slow_ranks(started, columns_of(lines))
    assert (found.rank, found.node) == (1, "b")
    assert found.share == pytest.approx(100 / sum(each.seconds for each in lines))


def test_the_fields_of_a_line_are_read_back():
    one = parse(line(1, [0.25, 0.125, 0.5]).to_json())
    assert (one.slowest_rank, one.slowest_s, one.others_s) == (2, 0.5, 0.1875)


def test_a_ranks_own_seconds_leave_out_its_waits():
    """Rank 1 of 2 works for 3 s, waits for 5 s and works for 1 s between two sums."""
    clock = FakeClock()
    heartbeat = HeartbeatSender(NoPage(), 1, clock)
    pace = Pace(1, 2, heartbeat, clock)
    assert pace.numbers() == [0.0, 0.0]  # nothing is measured before the first sum
    assert pace.read([0.0, 0.0]) == ()
    clock.now += 3.0
    with heartbeat.waiting():
        clock.now += 5.0
    clock.now += 1.0
    assert pace.numbers() == [0.0, 4.0]
    assert pace.read([9.0, 4.0]) == (9.0, 4.0)


@pytest.mark.parametrize(("shards", "workers"), [(4, 3), (8, 3), (8, 6), (8, 7), (32, 24)])
def test_a_rank_that_has_more_shards_is_not_slow(shards, workers):
    """A node was lost, and its shards went to some of the others; a step has a fixed part too."""
    draw = random.Random(0)
    own = [len(span(shards, workers, rank)) for rank in range(workers)]
    lines = [line(n, [0.1 + each + 0.01 * draw.random() for each in own], shards=own) for n in range(1, 301)]
    assert costs_s(lines) == {}
