"""Which steps are audited is a function of steps, seconds and measured costs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config.durations import Every
from elastic.train.loop.audit_schedule import AuditSchedule


def audited(schedule, first, last, *, step_s, cost_s, measured=1.0):
    """The steps of a process that are audited, from its first one.

    measured: which part of what an audit costs it sees itself.
    """
    due, is_audited = [], schedule.is_due(first, is_first=True)
    for step in range(first, last + 1):
        if is_audited:
            due.append(step)
            schedule.begin(step)
        # As in the loop: the next step is decided about before this one's costs are known.
        is_next = schedule.is_due(step + 1)
        schedule.add_step(step_s + cost_s * is_audited, measured * cost_s if is_audited else None)
        is_audited = is_next
    return due


@given(st.integers(1, 40), st.integers(1, 400))
def test_every_nth_step_is_audited_whichever_step_a_process_begins_with(every, first):
    """So that the same steps are audited whatever failed before."""
    schedule = AuditSchedule(Every.parse(f"{every}steps"))
    found = audited(schedule, first, first + 99, step_s=1.0, cost_s=9.0)
    assert found == [step for step in range(first, first + 100) if step % every == 0]


@given(st.floats(1e-4, 100), st.floats(1e-6, 10), st.integers(1, 1000), st.floats(0, 1))
def test_auto_costs_one_percent_of_the_time_after_its_first_audit(step_s, cost_s, first, measured):
    """The first one, in the second step, has to be paid to learn the cost: later steps make up for
    it. What an audit does not measure itself (it waits for other ranks) counts all the same.
    """
    steps, schedule = 2000, AuditSchedule(Every(kind="auto"))
    found = audited(schedule, first, first + steps, step_s=step_s, cost_s=cost_s, measured=measured)
    assert found[0] == first + 1
    spent_s, elapsed_s = len(found) * cost_s, steps * step_s + len(found) * cost_s
    assert len(found) == 1 or spent_s <= 0.010001 * elapsed_s


def test_auto_uses_the_one_percent_that_it_has():
    """A step of 50 ms, an audit of one: every hundredth step, but for what is rounded."""
    found = audited(AuditSchedule(Every(kind="auto")), 1, 2000, step_s=0.05, cost_s=0.05)
    assert 18 <= len(found) <= 21


@pytest.mark.parametrize("slow", [1, 20], ids=["the first", "a later one"])
def test_a_slow_step_is_no_reason_for_many_audits(slow):
    """A minute of loading, or an evaluation in the body: the next forty steps were audited, one
    after another, until a hundredth of that minute was spent.
    """
    schedule, due = AuditSchedule(Every(kind="auto")), []
    is_audited = schedule.is_due(1, is_first=True)
    for step in range(1, 400):
        if is_audited:
            schedule.begin(step)
            due.append(step)
        is_next = schedule.is_due(step + 1)
        seconds = 60.0 if step == slow else 0.05
        schedule.add_step(seconds + 0.02 * is_audited, 0.02 if is_audited else None)
        is_audited = is_next
    assert len(due) > 5
    assert all(after - before >= 40 for before, after in itertools.pairwise(due[1:]))


@pytest.mark.parametrize("text", ["30s", "10min"])
def test_an_interval_in_seconds_is_refused(text):
    """It was taken, and never due."""
    with pytest.raises(ValueError, match="expected steps between audits, auto or off, found"):
        AuditSchedule(Every.parse(text))


def test_auto_audits_every_step_where_that_costs_next_to_nothing():
    """An interval below one step is one step, once the first audit's cost is known."""
    found = audited(AuditSchedule(Every(kind="auto")), 1, 50, step_s=1.0, cost_s=1e-6)
    assert found == [2, *range(5, 51)]


def test_off_audits_nothing():
    """Not even to learn the cost."""
    assert audited(AuditSchedule(Every(kind="off")), 1, 50, step_s=1.0, cost_s=0.1) == []
