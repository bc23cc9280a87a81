"""Attacks on the interval between snapshots."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.config.durations import Every
from elastic.train.snapshot_policy import HYSTERESIS, SHARE, SnapshotSchedule, interval

SECONDS = st.floats(1e-4, 100, allow_nan=False)


@given(SECONDS, SECONDS)
def test_auto_costs_at_most_its_share_and_is_as_often_as_that_allows(cost_s, step_s):
    every = interval(cost_s, step_s)
    assert cost_s <= SHARE * step_s * every * (1 + 1e-9)
    assert every == 1 or cost_s > SHARE * step_s * (every - 1) * (1 - 1e-9)


@given(SECONDS, SECONDS, st.integers(1, 10_000))
def test_an_interval_that_is_nearly_right_stays(cost_s, step_s, now):
    wanted, kept = interval(cost_s, step_s), interval(cost_s, step_s, now)
    assert kept in (now, wanted)
    assert (kept == now) == (now / HYSTERESIS <= wanted <= now * HYSTERESIS) or now == wanted


def test_auto_takes_the_first_and_then_spaces_them_by_what_it_cost():
    kept = SnapshotSchedule(Every.parse("auto"))
    taken = []
    for step in range(1, 20):
        kept.took_step(1.0)
        if kept.is_due(step):
            taken.append(step)
            kept.took_snapshot(step)
            kept.learn(0.05)
    assert taken == [1, 6, 11, 16]


def test_a_number_is_kept_to_whatever_it_costs():
    kept = SnapshotSchedule(Every.parse("3steps"))
    taken = []
    for step in range(5, 15):
        kept.took_step(0.001)
        if kept.is_due(step):
            taken.append(step)
            kept.took_snapshot(step)
            assert not kept.learn(10.0)
    assert taken == [5, 8, 11, 14]


def test_off_takes_none():
    assert not any(SnapshotSchedule(Every.parse("off")).is_due(step) for step in range(100))


def test_a_snapshot_for_which_there_was_no_memory_is_not_tried_again_at_every_step():
    kept = SnapshotSchedule(Every.parse("4steps"))
    assert kept.is_due(1)
    kept.took_snapshot(1)
    assert [step for step in range(2, 7) if kept.is_due(step)] == [5, 6]
