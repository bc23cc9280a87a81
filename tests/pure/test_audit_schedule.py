"""Which steps are audited is a function of steps, seconds and measured costs."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.config.durations import Every
from elastic.train.audit_schedule import AuditSchedule


def audited(schedule, first, last, *, step_s, cost_s):
    """The steps of a process that are audited, from its first one."""
    due, is_audited = [], schedule.is_due(first, is_first=True)
    for step in range(first, last + 1):
        if is_audited:
            due.append(step)
            schedule.begin(step)
        # As in the loop: the next step is decided about before this one's costs are known.
        is_next = schedule.is_due(step + 1)
        schedule.add_step(step_s + cost_s * is_audited)
        if is_audited:
            schedule.add_audit(cost_s)
        is_audited = is_next
    return due


@given(st.integers(1, 40), st.integers(1, 400))
def test_every_nth_step_is_audited_whichever_step_a_process_begins_with(every, first):
    """So that the same steps are audited whatever failed before."""
    schedule = AuditSchedule(Every.parse(f"{every}steps"))
    found = audited(schedule, first, first + 99, step_s=1.0, cost_s=9.0)
    assert found == [step for step in range(first, first + 100) if step % every == 0]


@given(st.floats(1e-4, 100), st.floats(1e-6, 10), st.integers(1, 1000))
def test_auto_costs_one_percent_of_the_time_after_its_first_audit(step_s, cost_s, first):
    """The first one, in the second step, has to be paid to learn the cost."""
    steps = 2000
    found = audited(AuditSchedule(Every(kind="auto")), first, first + steps, step_s=step_s, cost_s=cost_s)
    assert found[0] == first + 1
    # The interval that follows an audit is over before the next one.
    assert (len(found) - 2) * cost_s <= 0.01 * steps * (step_s + cost_s)


def test_auto_audits_every_step_where_that_costs_next_to_nothing():
    """An interval below one step is one step, once the first audit's cost is known."""
    found = audited(AuditSchedule(Every(kind="auto")), 1, 50, step_s=1.0, cost_s=1e-6)
    assert found == [2, *range(4, 51)]


def test_off_audits_nothing():
    """Not even to learn the cost."""
    assert audited(AuditSchedule(Every(kind="off")), 1, 50, step_s=1.0, cost_s=0.1) == []
