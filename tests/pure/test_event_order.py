"""The order in which report and status take events, when clocks are wrong."""

from logged import record
from viewed import viewed

from elastic.config.run_dir import RunDir
from elastic.observe.log import read_events
from elastic.observe.step_line import StepLine

HOUR_S = 3600.0
AT = {"nodes": ["n1"], "world_size": 1}


def test_a_clock_set_back_makes_no_older_generation_the_newest(tmp_path):
    """By an hour, after generation 1 has failed; and once more, after generation 2 has begun."""
    run, uploader = RunDir.parse(str(tmp_path)), "uploader"
    record(run, "checkpoint_committed", 1, 10 * HOUR_S, uploader, step=4)
    record(run, "generation_started", 1, 10 * HOUR_S + 1, "agent-1", cause="start", **AT)
    record(run, "run_failed", 1, 10 * HOUR_S + 2, "agent-1", exit_code=1, reason="x")
    record(run, "generation_started", 2, 9 * HOUR_S, "agent-2", cause="failure", **AT)
    record(run, "checkpoint_committed", 2, now_s := 8 * HOUR_S, uploader, step=12)

    newest = StepLine(step=13, time=now_s + 1, generation=2)
    report = viewed(read_events(run.events), newest=newest, now=now_s + 1)
    assert (report.state, report.generation, report.checkpoints.newest.event.step) == ("running", 2, 12)
    assert [each.cause for each in report.recoveries] == ["failure"]
