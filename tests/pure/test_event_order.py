"""The order in which report and status take events, when clocks are wrong."""

from logged import logged
from viewed import viewed

from elastic.observe.log import EventLog, read_events
from elastic.observe.step_line import StepLine
from elastic.testing.fakes import FakeClock

HOUR_S = 3600.0


def write(folder, process, clock, *generations):
    """What one process records, a second apart: (generation, event)."""
    log = EventLog(folder / f"n1-{process}.jsonl", node="n1", clock=clock)
    for log.generation, event in generations:
        log.record(event)
        clock.now += 1.0


def test_a_clock_set_back_makes_no_older_generation_the_newest(tmp_path):
    """By an hour, after generation 1 has failed: generation 2 trains, says what it saved, and its
    clock is set back once more.
    """
    clock, at = FakeClock(), {"time": 0.0, "nodes": ["n1"], "world_size": 1}
    clock.now = 10 * HOUR_S
    start = [logged("generation_started", **at, cause=cause).event for cause in ("start", "failure")]
    saved = [logged("checkpoint_committed", 0.0, step=step).event for step in (4, 8, 12)]
    failed = logged("run_failed", 0.0, exit_code=1, reason="x").event
    write(tmp_path, "uploader", clock, (1, saved[0]))
    write(tmp_path, "agent-1", clock, (1, start[0]), (1, failed))
    clock.now -= HOUR_S
    write(tmp_path, "agent-2", clock, (2, start[1]))
    write(tmp_path, "uploader", clock, (2, saved[1]))
    clock.now -= HOUR_S
    write(tmp_path, "uploader", clock, (2, saved[2]))

    events = read_events(tmp_path)
    report = viewed(events, newest=StepLine(step=13, time=clock.now, generation=2), now=clock.now)
    assert (report.state, report.generation, report.checkpoints.newest.event.step) == ("running", 2, 12)
    assert [each.generation for each in report.generations] == [1, 2]
    assert [each.cause for each in report.recoveries] == ["failure"]
    assert report.failed is None
