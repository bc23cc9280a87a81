"""When a checkpoint or a snapshot is due is a function of steps, seconds and measured costs."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import LINK

from elastic.config.durations import Every
from elastic.errors import StoreFailed
from elastic.observe.log import EventLog, read_events
from elastic.snapshot.slots import Snapshot, SnapshotInfo
from elastic.testing.fakes import FakeClock
from elastic.train.loop import requests
from elastic.train.loop import schedule as module
from elastic.train.loop.schedule import SNAPSHOT_SHARE, AuditSchedule, SnapshotSchedule, is_save_due
from elastic.train.state import saving
from elastic.train.state.restore import ResumePoint
from elastic.train.state.saving import Checkpointing
from elastic.train.state.snapshotting import PublishedSnapshot
from elastic.train.step.parts import NOTHING, Requests
from elastic.uploader.protocol import SaveResult, SaveState

AUTO = Every(kind="auto")
COSTS = st.floats(0, 1e6)
SECONDS = st.floats(1e-4, 100, allow_nan=False)


@given(COSTS, st.floats(0, 1e4))
def test_auto_saves_when_the_interval_of_its_cost_is_over(cost_s, since_s):
    """And never later than after the longest interval; at once, where the cost is not known. Steps
    and seconds that are given count whatever the cost.
    """
    assert is_save_due(Every.parse("3steps"), step=6, since_s=0.0, cost_s=cost_s)
    assert not is_save_due(Every.parse("3steps"), step=7, since_s=since_s, cost_s=cost_s)
    assert is_save_due(Every.parse("2min"), step=1, since_s=since_s, cost_s=cost_s) == (since_s >= 120)
    assert is_save_due(AUTO, step=1, since_s=0.0, cost_s=None)
    assert is_save_due(AUTO, step=3, since_s=since_s, cost_s=cost_s) == (
        since_s >= module.save_interval_s(cost_s)
    )
    assert is_save_due(AUTO, step=3, since_s=module.MAX_INTERVAL_S, cost_s=cost_s)


def test_the_save_interval_is_where_saving_costs_as_losing():
    """Young's condition by a dumb search: seconds lost to saves and to faults are least there."""
    for cost_s in (0.01, 0.1, 1.0, 10.0):
        intervals = (i / 100 for i in range(100, 60_000))
        best = min(intervals, key=lambda interval: cost_s / interval + interval / (2 * module.FAULT_EVERY_S))
        assert module.save_interval_s(cost_s) == pytest.approx(best, abs=0.02)


YOUNG = ResumePoint(step=0, chain="", source="none")


def published(step, cost_s):
    snapshot = Snapshot(slot=0, seq=2, size_bytes=1, info=SnapshotInfo(step=step, generation=1))
    return PublishedSnapshot(slots=Mock(), snapshot=snapshot, cost_s=cost_s)


class FakeUploader:
    """Gives these results; taking an offer costs the trainer `offer_s`."""

    def __init__(self, monkeypatch, clock, *results, offer_s=0.0):
        self.clock, self.offer_s, self.results = clock, offer_s, list(results)
        monkeypatch.setattr(saving, "offer", self.offer)

    def offer(self, _path, _slots, snapshot, **_how):
        self.clock.sleep(self.offer_s)
        if not self.results:
            raise StoreFailed("expected an uploader, found none")
        self.step = snapshot.info.step
        return self

    def wait(self, _timeout_s):
        return SaveResult(step=self.step, state=self.results.pop(0), reason="it died")


def test_the_save_interval_counts_the_copy_into_the_slot(monkeypatch):
    """A snapshot that costs 3 s and an offer that costs 1 s: the next save is due after 120 s."""
    clock = FakeClock()
    FakeUploader(monkeypatch, clock, SaveState.COMMITTED, offer_s=1.0)
    checkpointing = Checkpointing(LINK, clock, None, YOUNG)
    assert checkpointing.is_due(1)
    began_s = clock.monotonic()
    checkpointing.save(published(1, cost_s=3.0), 1)

    clock.now = began_s + module.save_interval_s(4.0) - 0.1
    assert not checkpointing.is_due(2)
    clock.sleep(0.1)
    assert checkpointing.is_due(2)


def test_a_save_that_dies_with_its_uploader_is_recorded(tmp_path, monkeypatch):
    """And one that no uploader takes, or for which there is no memory. The uploader records the
    others.
    """
    clock = FakeClock()
    log = EventLog(tmp_path / "worker.jsonl", node="n1", clock=clock)
    FakeUploader(monkeypatch, clock, SaveState.LOST, SaveState.FAILED)
    checkpointing = Checkpointing(LINK, clock, log, YOUNG)
    lost = published(5, cost_s=0.0)
    checkpointing.save(lost, 5)
    checkpointing.save(published(6, cost_s=0.0), 6)
    lost.slots.release_all.assert_called_once_with()  # which the dead one cannot give back
    checkpointing.is_due(7)
    checkpointing.save(published(7, cost_s=0.0), 7, final=True)
    assert checkpointing.wait(7) == "expected an uploader, found none"
    checkpointing.save(None, 8)
    assert [(each.event.name, each.event.step, each.event.reason) for each in read_events(tmp_path)] == [
        ("checkpoint_failed", 5, "it died"),
        ("checkpoint_failed", 7, "expected an uploader, found none"),
        ("checkpoint_failed", 8, "there is no memory for a copy of the state"),
    ]


@given(SECONDS, SECONDS, st.none() | st.integers(1, 10_000))
def test_an_interval_keeps_its_share_and_has_hysteresis(cost_s, step_s, current):
    """One that is too short never stays: the share is a promise."""
    chosen = module.affordable_interval(cost_s, step_s, current, SNAPSHOT_SHARE)
    assert cost_s <= SNAPSHOT_SHARE * step_s * chosen * (1 + 1e-9)
    if chosen != current:
        assert chosen == 1 or cost_s > SNAPSHOT_SHARE * step_s * (chosen - 1) * (1 - 1e-9)
    elif chosen > 1:
        assert cost_s > SNAPSHOT_SHARE * step_s * (chosen / module.HYSTERESIS - 1) * (1 - 1e-9)


@given(st.floats(1e-4, 2.0), st.floats(1e-3, 10.0))
def test_snapshots_before_evaluations_cost_their_share_at_most(cost_s, step_s):
    """With a process that lasts a minute. They are no part of the other snapshots' interval."""
    schedule, taken = SnapshotSchedule(AUTO), 0
    for step in range(1, 300):
        schedule.add_step(step_s)
        if schedule.is_due(step):
            schedule.interval.begin(step)
            schedule.add_cost(cost_s)
        elif schedule.is_due(step, evaluates_next=True):
            taken += 1
    assert taken * cost_s <= SNAPSHOT_SHARE * (module.CREDIT_S + 300 * step_s)
    assert taken > 0 or cost_s > SNAPSHOT_SHARE * module.CREDIT_S or schedule.interval.steps == 1


def audited(schedule, first, last, *, step_s, cost_s):
    """The steps of a process that are audited, from its first one."""
    due, is_audited = [], schedule.is_due(first, is_first=True)
    for step in range(first, last + 1):
        if is_audited:
            due.append(step)
            schedule.interval.begin(step)
        # As in the loop: the next step is decided about before this one's costs are known.
        is_next = schedule.is_due(step + 1)
        schedule.add_step(step_s + cost_s * is_audited, is_audited=is_audited)
        is_audited = is_next
    return due


@given(st.integers(1, 40), st.integers(1, 400))
def test_every_nth_step_is_audited_wherever_a_process_begins(every, first):
    """So that the same steps are audited whatever failed before."""
    schedule = AuditSchedule(Every.parse(f"{every}steps"))
    found = audited(schedule, first, first + 99, step_s=1.0, cost_s=9.0)
    assert found == [step for step in range(first, first + 100) if step % every == 0]


@given(st.floats(1e-4, 100), st.floats(1e-6, 10), st.integers(1, 1000))
def test_auto_audits_cost_one_percent_after_the_first(step_s, cost_s, first):
    """The first one, in the second step, has to be paid to learn the cost."""
    steps, schedule = 2000, AuditSchedule(AUTO)
    found = audited(schedule, first, first + steps, step_s=step_s, cost_s=cost_s)
    assert found[0] == first + 1
    spent_s = (len(found) - 1) * cost_s
    assert spent_s <= module.AUDIT_SHARE * (steps * step_s + spent_s) * (1 + 1e-4)


def test_each_computation_of_a_step_is_answered_alike(monkeypatch):
    """The last one counts. Later steps ask again at the step that may be due."""
    due = Requests(drain=False, snapshot=True, save=False)
    monkeypatch.setattr(requests, "requests_of", lambda *_: due)
    monkeypatch.setattr(requests, "quiet_until", lambda *_: 9)
    ask = requests.Asking(SimpleNamespace(page=SimpleNamespace(drain=False)), None).ask
    assert [ask(n, s, 20) for n, s in ((1, 0), (1, 0), (2, 0.01), (9, 0.01))] == [due, due, NOTHING, due]
