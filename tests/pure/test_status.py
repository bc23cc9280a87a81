"""The state of a run follows from its events, its newest step and its nodes' heartbeats."""

import json
from dataclasses import asdict, replace

import pytest
from logged import logged
from viewed import viewed

from elastic.observe.step_line import StepLine
from elastic.report.figures import status_json

NOW = 1000.0


def status(events, newest, beat_ages_s):
    """What `status --json` prints: as plain JSON."""
    view = viewed(events, newest=newest, beats=beat_ages_s, now=NOW)
    return json.loads(json.dumps(status_json(view), default=asdict))


START = [
    logged("generation_started", 900.0, world_size=2, nodes=["n1", "n2"], cause="start"),
    logged("worker_started", 901.0, rank=1, pid=11, node="n2"),
    logged("worker_started", 901.0, rank=0, pid=10),
    logged("run_started", 902.0, steps=560, epochs=8),
    logged("checkpoint_committed", 950.0, step=100, size_bytes=1, seconds=0.1, digest="d"),
]


def test_a_live_run_shows_its_step_workers_and_newest_checkpoint():
    found = status(START, StepLine(step=120), {"n1": 0.5, "n2": 9.0})

    assert found == {
        "state": "running",
        "step": 120,
        "steps": 560,
        "generation": 1,
        "world_size": 2,
        "workers": [{"rank": 0, "node": "n1", "pid": 10}, {"rank": 1, "node": "n2", "pid": 11}],
        "standbys": 0,
        "last_checkpoint": {"step": 100, "age_s": 50.0},
        "stopped": None,
        "plain": None,
    }


LEFT, FAILED = (logged(name, 960.0) for name in ("run_interrupted", "run_failed"))
AGAIN = logged("generation_started", 970.0, 2, world_size=1, nodes=["n1-again"], cause="resume")
ALONE = logged("generation_started", 960.0, 2, world_size=1, nodes=["n1"], cause="node left")
IN_2 = StepLine(step=9, time=994.0, generation=2)
YOUNG, OLD = (StepLine(step=9, time=time, generation=1) for time in (995.0, 985.0))


@pytest.mark.parametrize(
    ("later", "beat_ages_s", "newest", "state"),
    [
        ([], {"n1": 3.0}, None, "running"),
        ([], {"n1": 30.0}, None, "interrupted"),
        ([logged("run_interrupted", 990.0, step=100)], {"n1": 30.0}, None, "drained"),
        # A node that was drained a second ago is gone.
        ([logged("run_interrupted", 999.0, step=100)], {"n1": 1.0}, None, "drained"),
        ([logged("run_interrupted", 990.0, node="n2")], {"n1": 3.0, "n2": 1.0}, None, "running"),
        ([logged("run_failed", 990.0)], {}, None, "failed"),
        # It was started again after a failure, and waits for others.
        ([logged("run_failed", 990.0)], {"n9": 1.0}, None, "running"),
        ([logged("run_interrupted", 990.0, gave_up=True)], {}, None, "interrupted"),
        ([logged("run_finished", 990.0, steps=560)], {"n1": 0.1}, None, "finished"),
        # The nodes meet in another folder, so that the run directory has no heartbeats.
        ([], {}, YOUNG, "running"),
        ([], {}, OLD, "interrupted"),
        ([], {}, replace(OLD, seconds=6.0), "running"),
        ([logged("run_interrupted", 996.0)], {}, YOUNG, "drained"),
        # Events of an earlier start stay in the log for ever. The agent that resumes is a new node.
        *(([ended, AGAIN], {"n1": 40.0, "n1-again": 0.1}, None, "running") for ended in (LEFT, FAILED)),
        *(([ended, AGAIN], {"n1": 0.1, "n1-again": 99.0}, None, "interrupted") for ended in (LEFT, FAILED)),
        # A node that left alone writes its last event late: the others have saved its state first.
        *(
            ([ALONE, logged(name, 965.0, node="n2")], {"n1": age_s, "n2": 30.0}, None, state)
            for name in ("run_failed", "run_interrupted")
            for age_s, state in ((0.1, "running"), (30.0, "interrupted"))
        ),
        ([ALONE, logged("run_failed", 995.0, node="n2")], {}, IN_2, "running"),
    ],
)
def test_the_state_follows_from_events_beats_and_steps(later, beat_ages_s, newest, state):
    assert status([*START, *later], newest, beat_ages_s)["state"] == state


def test_a_run_with_a_silent_node_has_the_workers_left():
    """It waits for another node; the place to meet shows no beats of the dead one any more."""
    for beats in ({"n1": 1.0, "n2": 37.0}, {"n1": 1.0}):
        found = status(START, None, beats)
        assert (found["state"], found["world_size"]) == ("running", 1)
        assert [worker["node"] for worker in found["workers"]] == ["n1"]
    found = status(START, None, {"n9": 1.0})
    assert (found["state"], found["world_size"], found["workers"]) == ("running", 0, [])


def test_workers_of_an_older_generation_are_not_listed():
    later = [
        logged("generation_started", 960.0, 2, world_size=2, nodes=["n1", "n2"], cause="failure"),
        *(logged("worker_started", 961.0, 2, rank=rank, pid=20 + rank) for rank in (0, 1)),
        logged("worker_exited", 970.0, 2, rank=1, pid=21, code=1),
    ]
    (found,) = status([*START, *later], None, {"n1": 0.1})["workers"]
    assert found == {"rank": 0, "node": "n1", "pid": 20}


def test_a_run_ended_early_by_its_recipe_is_finished():
    """Also the report; and an end that was taken back (its step is not the last one) is none."""
    end = logged("stopped", 989.0, step=9, steps=560, reason="enough")
    finished = logged("run_finished", 990.0, steps=9, epochs=0, digest="d")
    found = status([*START, end, finished], StepLine(step=9), {})
    assert (found["state"], found["step"], found["steps"]) == ("finished", 9, 560)
    assert found["stopped"] == {"step": 9, "steps": 560, "reason": "enough"}
    assert asdict(viewed([*START, end, finished]).stopped) == found["stopped"]

    later = logged("run_finished", 995.0, steps=560, epochs=8, digest="d")
    assert status([*START, end, later], StepLine(step=560), {})["stopped"] is None
    assert status([*START, end], StepLine(step=9), {})["stopped"] is None
