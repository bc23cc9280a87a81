"""When a checkpoint is due is a function of steps, seconds and cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config.durations import Every
from elastic.train.save_policy import FAULT_EVERY_S, MAX_INTERVAL_S, MIN_INTERVAL_S, interval_s, is_due

AUTO = Every(kind="auto")
costs = st.floats(0, 1e6)


@given(st.integers(1, 50), st.integers(1, 500), st.floats(0, 1e6), st.none() | costs)
def test_every_nth_step_is_due_whatever_the_time(every, step, since_s, cost_s):
    """Counted from the run's first step, so that a resume saves at the same steps."""
    policy = Every.parse(f"{every}steps")
    assert is_due(policy, step=step, since_s=since_s, cost_s=cost_s) == (step in range(every, 501, every))


@pytest.mark.parametrize(("since_s", "due"), [(0.0, False), (119.9, False), (120.0, True), (500.0, True)])
def test_seconds_are_counted_since_the_last_save(since_s, due):
    """Neither the step nor the cost matters."""
    for step, cost_s in [(1, None), (977, 60.0)]:
        assert is_due(Every.parse("2min"), step=step, since_s=since_s, cost_s=cost_s) == due


def test_auto_saves_at_once_to_learn_the_price():
    """A young run has nothing to fall back to."""
    assert is_due(AUTO, step=1, since_s=0.0, cost_s=None)


@given(costs, st.floats(0, 1e4))
def test_auto_waits_for_the_interval_of_its_cost(cost_s, since_s):
    """And never longer than the longest interval."""
    assert is_due(AUTO, step=3, since_s=since_s, cost_s=cost_s) == (since_s >= interval_s(cost_s))
    assert is_due(AUTO, step=3, since_s=MAX_INTERVAL_S, cost_s=cost_s)


@given(costs, costs)
def test_dearer_saves_come_less_often_within_bounds(one, other):
    """Monotonic, and clamped at both ends: a save that costs nothing must not be made at every step."""
    cheap, dear = sorted((one, other))
    assert MIN_INTERVAL_S <= interval_s(cheap) <= interval_s(dear) <= MAX_INTERVAL_S


def test_the_interval_is_where_saving_and_losing_cost_the_same():
    """Young's condition as a dumb search: seconds lost to saves plus seconds lost to faults, for each candidate, are least there."""

    def lost_share(interval, cost_s):
        return cost_s / interval + interval / (2 * FAULT_EVERY_S)

    for cost_s in (0.01, 0.1, 1.0, 10.0):
        best = min((i / 100 for i in range(100, 60_000)), key=lambda interval: lost_share(interval, cost_s))
        assert interval_s(cost_s) == pytest.approx(best, abs=0.02)
