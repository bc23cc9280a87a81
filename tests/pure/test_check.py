"""A check of a recipe compares every step that a run trained with that of the calm run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.check import plan
from elastic.check.check import first_difference, unsteady_values
from elastic.check.plan import USUAL_CAUSE, launches
from elastic.faults.plan import parse
from elastic.proof.evidence import LOSS, TraceLine


def line(step, **changes):
    calm = TraceLine(
        step=step,
        generation=1,
        world_size=1,
        steps=9,
        shards=8,
        entries={LOSS: "0.5", "model.a": f"a{step}", "model.b": f"b{step}", "step.log(lr=...)": "0.1"},
    )
    return replace(calm, **changes)


def other(step, **entries):
    """The calm line of this step with these entries in place of its own."""
    return line(step, entries=line(step).entries | entries)


CALM = {step: line(step) for step in range(1, 10)}
RATE = {"step.log(lr=...)": "0.1"}
LOGGED = {"step.log(lr=...)": "0.2"}  # another rate


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ([*CALM.values(), line(5, generation=2, world_size=3)], None),  # trained twice
        # The replay of an earlier step differs, and a later one of the first generation does too.
        ([line(3), other(7, **{"model.a": "x"}), other(4, **{"model.b": "x"})], (4, "model.b")),
        ([line(2, entries={LOSS: "0.5", "model.a": "a2", **RATE})], (2, "model.b")),  # it lacks one
        ([other(2, **LOGGED, **{"model.a": "x", LOSS: "0.6"})], (2, LOSS)),
        ([other(2, **LOGGED)], (2, "step.log(lr=...)")),
        ([line(99, entries={})], None),  # beyond the steps that are compared
    ],
)
def test_the_first_step_and_entry_that_differ_are_named(found, difference):
    assert first_difference(CALM, found) == difference


def test_values_that_equal_commands_log_otherwise_do_not_count():
    """A recipe that logs seconds would never be the same."""
    calm = {1: other(1, **{"step.log(seconds=...)": "0.31"})}
    again = [other(1, **{"step.log(seconds=...)": "0.29"})]

    ignored = unsteady_values(calm, again)

    assert ignored == {"seconds"}
    assert first_difference(calm, again, ignored) is None
    both = [other(1, **{"step.log(seconds=...)": "0.3"} | LOGGED)]
    assert first_difference(calm, both, ignored) == (1, "step.log(lr=...)")


@given(st.integers(plan.FEWEST_STEPS, 1000), st.integers(1, 64), st.integers(1, 30))
def test_every_launch_fits_the_steps_and_shards_of_the_recipe(steps, shards, length):
    """A fault that can never be reached, or more workers than shards, would prove nothing."""
    planned = launches(steps, shards, set(range(length, steps, length)))
    assert [each.proof for each in planned] == list(USUAL_CAUSE)
    assert [each.workers for each in planned] == [1, min(3, shards), 1, min(2, shards)]
    assert [each.resumes for each in planned] == [False, False, True, False]
    for each in planned:
        assert each.leave_at is None or 1 <= each.leave_at < steps
        faults = parse(each.options[-1]) if each.options else []
        assert all(1 < fault.trigger.number <= steps for fault in faults)
        assert all(fault.trigger.who < each.workers for fault in faults)


@given(st.integers(10, 200), st.integers(3, 50))
def test_runs_go_on_within_an_epoch_and_where_one_begins(steps, length):
    """What a recipe sets at the beginning of an epoch is lost within it, and what it does at the
    end of one is lost there. In the first epoch, both may be as at the top of the script.
    """
    ends = set(range(length, steps, length))
    _, more_workers, _, killed = launches(steps, 8, ends)

    restored = [fault.trigger.number - 1 for fault in parse(killed.options[-1])]
    leave = more_workers.leave_at

    assert leave not in ends
    assert any(step not in ends for step in restored)
    assert any(step in ends for step in restored) == bool(ends)
    if steps > length + 2:
        assert leave > length
        assert max(restored) > length
