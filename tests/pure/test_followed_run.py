"""What follows a run's files adds up to what a report reads from all of them at once."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged

from elastic.config.run_dir import RunDir
from elastic.monitoring import followed_metrics
from elastic.monitoring.followed_metrics import FollowedMetrics, WentBack
from elastic.monitoring.followed_run import FollowedRun
from elastic.monitoring.run_totals import RunTotals
from elastic.observe import metrics
from elastic.observe.goodput import time_spent, time_spent_in
from elastic.observe.log import EventLog, read_events
from elastic.observe.metrics import Metrics
from elastic.observe.step_columns import add_step, columns_of
from elastic.observe.step_line import StepLine
from elastic.report.report import summarise
from elastic.testing.fakes import FakeClock


def line(step: int, generation: int) -> StepLine:
    time = 100.0 * generation + step
    return StepLine(step=step, loss=0.5, generation=generation, time=time, seconds=0.25, chain=f"{time}")


def take(followed: FollowedMetrics, lines: list[StepLine]) -> None:
    """Follow to the end of the file; `lines` becomes what counts by now."""
    while True:
        for item in followed.poll():
            if isinstance(item, WentBack):
                lines[:] = [each for each in lines if each.step <= item.step]
            else:
                assert not lines or item.step > lines[-1].step
                lines.append(item)
        if followed.is_at_end:
            return


moves = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.booleans(), st.booleans()), max_size=8)


@settings(max_examples=60, deadline=None)
@given(moves, st.integers(1, 6) | st.just(10**6), st.sampled_from([150, 400, 10**6]))
def test_lines_and_ways_back_give_the_metrics_file(tmp_path_factory, moves, dense, read_bytes):
    """Each move: a generation that goes so many steps back and does so many; then a poll, or none.
    Or, where each line has a mark, it goes on from the highest step: a node that was away brings
    that state, and the lines of older generations come back behind those of a newer one.

    A read takes a line or two, and marks are so few that the place where files part is between
    them.
    """
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    followed, seen, step = FollowedMetrics(path, dense=dense, read_bytes=read_bytes), [], 0
    highest = 0
    for generation, (back, forth, polls, returns) in enumerate(moves, start=1):
        writer = Metrics(path, generation=generation)
        step = highest if returns and dense > 6 else max(0, step - back)
        writer.rewind(step)
        for _ in range(forth):
            step += 1
            writer.append(line(step, generation))
        highest = max(highest, step)
        if polls:
            take(followed, seen)
    take(followed, seen)

    counts = metrics.read(path)
    assert seen == counts
    assert followed.newest == (counts[-1] if counts else None)
    sums = {}
    for each in counts:
        add_step(sums, each)
    assert followed.generations == sums
    followed.close()


def test_lines_of_an_older_generation_behind_a_newer_one_leave_it_its_time(tmp_path):
    """Generation 2 fell back to step 50 and did five; a node that was away brings step 100 back.
    Then the run goes back into each of the three parts.
    """
    path = tmp_path / "metrics.jsonl"
    followed, seen = FollowedMetrics(path), []
    for generation, (start, end) in enumerate([(0, 100), (50, 55), (100, 102), (101, 101)], start=1):
        writer = Metrics(path, generation=generation)
        writer.rewind(start)
        for step in range(start + 1, end + 1):
            writer.append(line(step, generation))
        take(followed, seen)
    assert [each.generation for each in seen] == [1] * 50 + [2] * 5 + [1] * 45 + [3]
    for generation, start in enumerate([90, 53, 20], start=5):
        Metrics(path, generation=generation).rewind(start)
        take(followed, seen)
        sums = {}
        for each in metrics.read(path):
            add_step(sums, each)
        assert followed.generations == sums
        assert (2 in sums) == (start > 50)


def test_a_fault_in_a_long_run_costs_no_reading_of_the_run(tmp_path, monkeypatch):
    path, steps = tmp_path / "metrics.jsonl", 20_000
    path.write_text("".join(f'{{"step": {n}, "time": {n}.0}}\n' for n in range(1, steps + 1)))
    followed, seen = FollowedMetrics(path, dense=512), []
    take(followed, seen)
    writer = Metrics(path, generation=2)
    writer.rewind(steps - 100)
    writer.append(line(steps - 99, 2))
    read = []
    pread = followed_metrics.os.pread
    monkeypatch.setattr(followed_metrics.os, "pread", lambda *words: read.append(d := pread(*words)) or d)

    items = [*followed.poll()]

    assert [type(each) for each in items] == [WentBack, StepLine]
    assert items[0].step == steps - 100
    assert sum(map(len, read)) < path.stat().st_size / 10
    read.clear()
    assert [*followed.poll()] == []  # and where nothing is new, nothing is read
    assert read == [b""]


def test_a_line_longer_than_a_read_is_left_out_as_by_other_readers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "text": "' + "x" * 500 + '"}\n{"step": 3}\n')
    seen = []
    take(FollowedMetrics(path, read_bytes=100), seen)
    assert [each.step for each in seen] == [1, 3]


def test_damaged_lines_and_missing_files_are_no_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    followed, seen = FollowedMetrics(path), []
    take(followed, seen)
    path.write_text('{"step": 1}\nnot json\n{"step": "two"}\n{"step": 3}\n{"step": 4')
    take(followed, seen)
    assert [each.step for each in seen] == [1, 3]


CAUSES = ("failure", "node lost", "node joined", "node left", "resume")


@st.composite
def histories(draw):
    """(events, lines): of one clock and several nodes, in the order in which they were written."""
    now, step, highest = 100.0, 0, 0
    items = []
    for generation in range(1, draw(st.integers(1, 5)) + 1):
        cause = "start" if generation == 1 else draw(st.sampled_from(CAUSES))
        now += 1
        node = draw(st.sampled_from(["a", "b"]))
        items.append(logged("generation_started", now, generation, node=node, cause=cause, nodes=[node]))
        back = draw(st.integers(max(0, step - 3), step))
        now += 0.5
        lost = {"step": back, "lost_steps": highest - back}
        items.append(logged("restored", now, generation, node=node, source="snapshot", **lost))
        step = back
        for _ in range(draw(st.integers(0, 4))):
            step, now = step + 1, now + 1
            items.append((generation, step, now))
            if step == highest + 1 and not any(
                each.event.name == "first_step" and each.generation == generation
                for each in items
                if not isinstance(each, tuple)
            ):
                items.append(logged("first_step", now, generation, node=node, step=step))
            highest = max(highest, step)
        highest = step if draw(st.booleans()) and step > highest else highest
        for name in draw(st.lists(st.sampled_from(["worker_exited", "generation_ended"]), max_size=2)):
            now += 0.25
            items.append(logged(name, now, generation, node=draw(st.sampled_from(["a", "b"]))))
        if draw(st.booleans()):
            now += 0.25
            items.append(logged("checkpoint_committed", now, generation, node=node, step=step, seconds=0.5))
    return items


def write(run: RunDir, items, polls, on_poll) -> None:
    """Put a history into a run directory; `on_poll` is called behind some of its items."""
    clock, writer = FakeClock(), None
    logs = {node: EventLog(run.events / f"{node}.jsonl", node=node, clock=clock) for node in ("a", "b")}
    generation = 0
    for item, is_polled in zip(items, polls, strict=False):
        if isinstance(item, tuple):
            number, step, time = item
            writer.append(StepLine(step=step, generation=number, time=time, seconds=0.75, chain=f"{time}"))
        else:
            if item.event.name == "restored":
                generation += 1
                writer = Metrics(run.metrics, generation=generation)
                writer.rewind(item.event.step)
            log = logs[item.node]
            log.generation = item.generation
            log._file.append(item.to_json())
        if is_polled:
            on_poll()


@settings(max_examples=60, deadline=None)
@given(histories(), st.lists(st.booleans(), min_size=80, max_size=80))
def test_totals_are_those_of_the_report_and_counters_never_fall(tmp_path_factory, items, polls):
    """Followed item by item, and read once at the end as by an agent that starts then."""
    run = RunDir.parse(str(tmp_path_factory.mktemp("run")))
    followed = FollowedRun(run, "a")
    counters = []

    def poll(of: FollowedRun, seen: list) -> None:
        while True:
            for _ in of.poll():
                pass
            if of.is_caught_up:
                break
        totals = of.totals
        seen.append((totals.steps, totals.lost_steps, len(totals.recovered), sum(totals.step_time.counts)))

    write(run, items, polls, lambda: poll(followed, counters))
    poll(followed, counters)
    late = FollowedRun(run, "a")
    poll(late, late_counters := [])

    events, lines = read_events(run.events), metrics.read(run.metrics)
    report = summarise(events, lines)
    assert all(
        before <= after for one, other in pairwise(counters) for before, after in zip(one, other, strict=True)
    )
    # The lines of lost steps are gone, so that who comes late may have fewer in the histogram.
    assert late_counters[-1][:3] == counters[-1][:3]
    assert late_counters[-1][3] == len(lines) <= counters[-1][3]
    for totals in (followed.totals, late.totals):
        assert totals.lost_steps == report.lost_steps
        assert totals.checkpoints["committed"] == report.checkpoints.committed
        firsts = {each.generation for each in events if each.event.name == "first_step"}
        over = [
            each
            for each, summary in zip(report.recoveries, report.generations[1:], strict=True)
            if summary.generation in firsts
        ]
        assert [each.recovery.cause for each in totals.recovered] == [each.cause for each in over]
        assert totals.steps >= report.steps
    assert [each.recovery for each in late.totals.recovered] == over
    for each in (followed, late):
        spent = time_spent_in(each.totals.marks(), each.metrics.generations, each.totals.seen_s)
        expected = time_spent(events, columns_of(lines))
        assert spent.wall_s == pytest.approx(expected.wall_s)
        assert spent.useful_s == pytest.approx(expected.useful_s)
        assert spent.badput_s == pytest.approx(expected.badput_s)


def test_who_begins_to_follow_late_measures_an_old_recovery_as_the_report_does(tmp_path):
    """A node fell silent after step 100, and thousands of steps follow: only the last step before
    tells when.
    """
    run = RunDir.parse(str(tmp_path / "run"))

    def started(time, generation, cause):
        return logged("generation_started", time, generation, world_size=2, nodes=["a"], cause=cause)

    history = [
        started(0.0, 1, "start"),
        logged("restored", 0.5, 1, step=0, source="none", lost_steps=0, seconds=0.1),
        *((1, n, 1.0 * n) for n in range(1, 101)),
        logged("generation_ended", 130.0, 1, cause="node lost", step=100),
        started(130.5, 2, "node lost"),
        logged("restored", 131.0, 2, step=100, source="snapshot", lost_steps=0, seconds=0.1),
        logged("first_step", 134.0, 2, step=101),
        *((2, n, 33.0 + n) for n in range(101, followed_metrics.DENSE + 1000)),
    ]
    items = [each if isinstance(each, tuple) else replace(each, node="a") for each in history]
    write(run, items, [False] * len(items), lambda: None)
    late = FollowedRun(run, "a")
    while not late.is_caught_up:
        for _ in late.poll():
            pass
    (found,) = late.totals.recovered
    (expected,) = summarise(read_events(run.events), metrics.read(run.metrics)).recoveries
    assert found.recovery == expected
    assert (expected.detect_s, expected.total_s) == (30.0, 34.0)


def test_the_time_without_a_node_is_a_phase_of_its_own_as_in_the_report(tmp_path):
    """The group gave up, and the agent that resumes a minute later reads all events."""
    run = RunDir.parse(str(tmp_path / "run"))
    starts = {"world_size": 2, "nodes": ["a", "b"]}
    events = [
        logged("generation_started", 0.0, 1, "a", cause="start", **starts),
        logged("generation_ended", 5.0, 1, "a", cause="the generation ended: node lost", step=3),
        logged("run_interrupted", 30.0, 1, "a", step=3, reason="b is away", gave_up=True),
        logged("generation_started", 90.0, 2, "a", cause="resume", **starts),
        logged("restored", 91.0, 2, "a", step=3, source="checkpoint", lost_steps=0, seconds=0.1),
        logged("first_step", 92.0, 2, "a", step=4),
    ]
    restored = logged("restored", 0.5, 1, "a", step=0, source="none", lost_steps=0, seconds=0.1)
    items = [events[0], restored, *((1, n, 1.0 * n) for n in (1, 2, 3)), *events[1:], (2, 4, 92.0)]
    write(run, items, [False] * len(items), lambda: None)
    late = FollowedRun(run, "a")
    while not late.is_caught_up:
        for _ in late.poll():
            pass
    found = summarise(read_events(run.events), metrics.read(run.metrics))
    (recovery,) = found.recoveries
    assert [each.recovery for each in late.totals.recovered] == [recovery]
    assert (recovery.rendezvous_s, recovery.down_s) == (25.0, found.badput_s["down"])
    assert late.totals.phase_time["resume", "down"].sum == 60.0


def test_a_recovery_in_many_tries_begins_with_the_first_fault_as_in_the_report(tmp_path):
    """More of them than generations whose events are kept."""
    run = RunDir.parse(str(tmp_path / "run"))
    starts = {"world_size": 1, "nodes": ["a"]}
    exited = {"rank": 0, "pid": 7, "code": 3, "signal": None, "victim": False}
    restored = {"step": 0, "source": "none", "lost_steps": 0, "seconds": 0.1}
    items = [
        logged("generation_started", 0.0, 1, "a", cause="start", **starts),
        logged("restored", 0.5, 1, "a", **restored),
        logged("first_step", 1.0, 1, "a", step=1),
        (1, 1, 1.0),
        logged("worker_exited", 5.0, 1, "a", **exited),
    ]
    for number in range(2, 42):
        items += [
            logged("generation_started", 10.0 * number, number, "a", cause="failure", **starts),
            logged("worker_exited", 10.0 * number + 5.0, number, "a", **exited),
        ]
    items += [
        logged("generation_started", 500.0, 42, "a", cause="failure", **starts),
        logged("restored", 500.5, 42, "a", **restored),
        logged("first_step", 501.0, 42, "a", step=2),
        (2, 1, 500.9),
        (2, 2, 501.0),
    ]
    followed = FollowedRun(run, "a")

    def poll():
        while True:
            for _ in followed.poll():
                pass
            if followed.is_caught_up:
                break

    write(run, items, [True] * len(items), poll)
    found = summarise(read_events(run.events), metrics.read(run.metrics)).recoveries[-1]
    assert [each.recovery for each in followed.totals.recovered] == [found]
    assert (found.total_s, found.tries) == (496.0, 41)


def test_a_step_that_is_done_again_counts_once():
    totals = RunTotals()
    for step in (1, 2, 3, 2, 3, 4):
        totals.add_line(line(step, 1))
    assert (totals.steps, sum(totals.step_time.counts), totals.step_time.sum) == (4, 4, 1.0)
