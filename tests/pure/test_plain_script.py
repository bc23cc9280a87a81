"""A script without the library is shown by its restarts, its exit and its time."""

import io
from contextlib import redirect_stdout

from logged import logged
from viewed import viewed

from elastic.report import tables
from elastic.report.figures import report_json

ONE = {"world_size": 1, "nodes": ["n1"], "plain": True}
FAILED_ONCE = [
    logged("generation_started", 100.0, cause="start", **ONE),
    logged("generation_ended", 110.0, cause="rank 0 ended with signal 9", step=0),
    logged("generation_started", 112.0, 2, cause="failure", **ONE),
]
FINISHED = [*FAILED_ONCE, logged("run_finished", 120.0, 2, steps=0, epochs=0, digest="")]


def shown(events, now=130.0, beats=None):
    """What `status` and `report` print."""
    found = viewed(events, beats=beats, now=now)
    with redirect_stdout(io.StringIO()) as out:
        tables.show(tables.status_tables("run", found))
        tables.show(tables.report_tables("run", found))
    return out.getvalue()


def test_a_finished_plain_script_has_no_steps_nor_goodput():
    report = report_json(viewed(FINISHED))
    assert (report["steps"], report["badput_s"], report["recoveries"]) == (0, {}, [])
    text = shown(FINISHED)
    assert "20.0 s in its generations" in text
    assert "1 (1 failure)" in text
    assert "exit code 0" in text
    for word in ("goodput", "checkpoint", "unknown number", "0 steps", "first step", "finished no"):
        assert word not in text


def test_other_arguments_make_a_finished_plain_script_run_again():
    again = [*FINISHED, logged("generation_started", 140.0, 3, cause="resume", **ONE)]
    found = viewed(again, beats={"n2": 1.0}, now=145.0)
    assert found.state == "running"
    assert found.end is None


def test_a_failed_plain_script_shows_its_exit_once():
    failed = [*FAILED_ONCE, logged("run_failed", 120.0, 2, exit_code=1, reason="rank 0 raised")]
    assert viewed(failed, now=130.0).state == "failed"
    assert shown(failed).count("exit code 1: rank 0 raised") == 4
