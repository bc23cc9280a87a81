"""The view of a run is what its files say, and the same however they are read."""

import math
from dataclasses import replace

import numpy as np
import pytest
from drawn_runs import BEGAN, line, write
from hypothesis import given
from hypothesis import strategies as st
from logged import logged, started

from elastic.config.run_dir import RunDir
from elastic.observe.reader import read_newest, read_run
from elastic.observe.run_view import view_of
from elastic.observe.series import thinned

NODES = ["n1", "n2"]
KILLED = [
    started(BEGAN, 1, "start", NODES),
    logged("worker_started", BEGAN + 1, 1, "n2", rank=2, pid=7),
    logged("run_started", BEGAN + 1, 1, steps=40, epochs=4, steps_per_epoch=10),
    logged("restored", BEGAN + 1, 1, step=0, source="none", lost_steps=0, last_step_s=None),
    logged("first_step", BEGAN + 2, 1, step=1),
    logged("checkpoint_committed", BEGAN + 3, 1, step=5, size_bytes=9, seconds=0.5),
    logged("worker_exited", BEGAN + 12, 1, "n2", rank=2, pid=7, code=None, signal="SIGKILL"),
    logged("generation_ended", BEGAN + 12.5, 1, cause="rank 2 ended with signal 9", step=11),
    started(BEGAN + 13, 2, "failure", NODES),
    logged("restored", BEGAN + 14, 2, step=10, source="snapshot", lost_steps=1, last_step_s=None),
    logged("first_step", BEGAN + 16, 2, step=12),
    logged("rehearsed", BEGAN + 17, 2, step=12, seconds=0.5, verdict="alike", not_restored={"cache": "1, 2"}),
    logged("overlapped", BEGAN + 18, 2, step=13, seconds=0.25, verdict="once", not_restored={}),
    logged("checkpoint_failed", BEGAN + 19, 2, step=14, reason="disk full"),
    logged("run_interrupted", BEGAN + 30, 2, "n1", step=20, gave_up=False),
    logged("run_interrupted", BEGAN + 30, 2, "n2", step=20, gave_up=False),
]
STEPS = [
    *(line(step, BEGAN + 1 + step, 1) for step in range(1, 11)),
    *(line(step, BEGAN + 4 + step, 2) for step in range(11, 21)),
]


def view(folder, beats=None, points=0):
    return view_of(read_run(RunDir.parse(str(folder)), points=points), beats)


def test_a_run_that_was_killed_and_drained(tmp_path):
    run = write(tmp_path / "run", KILLED, STEPS)
    found, newest = view(run), view_of(read_newest(RunDir.parse(str(run))))
    for each in (found, newest):
        assert (each.state, each.step, each.length, each.generation) == ("drained", 20, 40, 2)
    assert (found.lost_steps, found.epochs, found.restarts, found.world_size) == (1, 2, 0, 0)
    assert [(each.first_step, each.last_step, each.why) for each in found.generations] == [
        (1, 11, "start"),
        (11, 20, "rank 2 was killed by SIGKILL"),
    ]
    (back,) = found.recoveries
    assert (back.cause, back.total_s, back.source) == ("failure", 4.0, "snapshot")
    assert (found.incidents[2].node, found.incidents[2].text) == ("n2", "rank 2 was killed by SIGKILL")
    assert (found.rehearsals.alike, found.overlaps.count, found.overlaps.alike) == (1, 1, 0)
    assert found.not_restored == {"cache": "1, 2"}
    saved = found.checkpoints
    assert (saved.committed, saved.failed, saved.newest.event.step, saved.saving_s) == (1, 1, 5, [0.5])
    assert [each.kind for each in found.incidents] == [
        *("generation", "checkpoint", "fault", "generation", "recovery", "save", "drain", "drain")
    ]
    assert found.incidents[5].text == "save of step 14 failed: disk full"


def test_a_rehearsal_that_differed_is_counted(tmp_path):
    events = [
        started(BEGAN, 1, "start", NODES),
        started(BEGAN + 5, 2, "rehearsal", NODES),
        logged("step_differed", BEGAN + 6, 2, step=1, entries=["loss"], verdict="random", accepted=False),
    ]
    found = view(write(tmp_path / "run", events, []))
    assert [(each.count, each.alike) for each in (found.rehearsals, found.overlaps)] == [(1, 0), (0, 0)]


def test_values_without_a_number_have_no_curve(tmp_path):
    lines = [
        replace(each, values={"lr": 0.5, "note": "x", "late": 1 if each.step > 9 else "x"}) for each in STEPS
    ]
    curves = view(write(tmp_path / "run", KILLED, lines), points=100).curves
    assert [each.name for each in curves.logged] == ["lr", "late"]
    assert (curves.logged[1].gaps, curves.logged[1].first_gap) == (9, 1)


@given(st.lists(st.floats(-3, 3) | st.just(math.nan), min_size=1, max_size=300))
def test_a_curve_keeps_its_extremes_its_gaps_and_its_end(values):
    found = thinned("x", np.arange(1, len(values) + 1), np.array(values), 12)
    assert len(found.at) <= 13 and found.at[-1] == len(values)
    known = [value for value in values if not math.isnan(value)]
    shown = [value for value in found.values if value is not None]
    ends = [min(shown, default=0), max(shown, default=0)]
    assert ends == pytest.approx([min(known, default=0), max(known, default=0)], rel=1e-5)
    assert found.gaps == len(values) - len(known)
    assert (found.first_gap in found.at) == bool(found.gaps)
