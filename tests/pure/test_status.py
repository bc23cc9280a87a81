"""The state of a run follows from its events, its newest step and its nodes' heartbeats."""

import json
from dataclasses import asdict

import pytest
from logged import logged
from viewed import viewed

from elastic.observe.step_line import StepLine
from elastic.report.figures import status_json

NOW = 1000.0


def status(events, newest, beat_ages_s, now):
    """What `status --json` prints: as plain JSON."""
    return json.loads(
        json.dumps(status_json(viewed(events, newest=newest, beats=beat_ages_s, now=now)), default=asdict)
    )


START = [
    logged("generation_started", 900.0, world_size=2, nodes=["n1", "n2"], cause="start"),
    logged("worker_started", 901.0, rank=1, pid=11, node="n2"),
    logged("worker_started", 901.0, rank=0, pid=10),
    logged("run_started", 902.0, steps=560, epochs=8),
    logged("checkpoint_committed", 950.0, step=100, size_bytes=1, seconds=0.1, digest="d"),
]


def test_a_live_run_shows_its_step_workers_and_newest_checkpoint():
    found = status(START, StepLine(step=120), {"n1": 0.5, "n2": 9.0}, NOW)

    assert found == {
        "state": "running",
        "step": 120,
        "steps": 560,
        "generation": 1,
        "world_size": 2,
        "workers": [{"rank": 0, "node": "n1", "pid": 10}, {"rank": 1, "node": "n2", "pid": 11}],
        "last_checkpoint": {"step": 100, "age_s": 50.0},
        "stopped": None,
        "plain": None,
    }


@pytest.mark.parametrize(
    ("last", "beat_ages_s", "state"),
    [
        (None, {"n1": 3.0}, "running"),
        (None, {"n1": 30.0}, "interrupted"),
        (None, {}, "interrupted"),
        (logged("run_interrupted", 990.0, step=100), {"n1": 30.0}, "drained"),
        (logged("run_interrupted", 999.0, step=100), {"n1": 1.0}, "drained"),
        (logged("run_interrupted", 990.0, step=100, node="n2"), {"n1": 3.0, "n2": 1.0}, "running"),
        (logged("run_failed", 990.0, exit_code=1, reason="x"), {}, "failed"),
        (logged("run_failed", 990.0, exit_code=1, reason="x"), {"n9": 1.0}, "running"),
        (logged("run_interrupted", 990.0, step=100, gave_up=True), {}, "interrupted"),
        (logged("run_finished", 990.0, steps=560, epochs=8, digest="d"), {"n1": 0.1}, "finished"),
    ],
)
def test_the_state_follows_from_the_last_event_and_heartbeats(last, beat_ages_s, state):
    """A node that was drained a second ago is gone; a run goes on while another node works, as one
    does that was started again after a failure and waits for others.
    """
    assert status([*START, *([last] if last else [])], None, beat_ages_s, NOW)["state"] == state


def test_a_run_with_a_silent_node_has_the_workers_left():
    """It waits for another node; the place to meet shows no beats of the dead one any more."""
    for beats in ({"n1": 1.0, "n2": 37.0}, {"n1": 1.0}):
        found = status(START, None, beats, NOW)
        assert (found["state"], found["world_size"]) == ("running", 1)
        assert [worker["node"] for worker in found["workers"]] == ["n1"]
    found = status(START, None, {"n9": 1.0}, NOW)
    assert (found["state"], found["world_size"], found["workers"]) == ("running", 0, [])


def test_a_run_before_its_first_generation_has_every_key():
    found = status([], None, {"n1": 0.1}, NOW)
    assert (found["state"], found["step"], found["steps"], found["last_checkpoint"]) == (
        "running",
        0,
        None,
        None,
    )
    assert found.keys() == status(START, None, {}, NOW).keys()


def test_a_generation_that_has_ended_has_no_workers():
    ended = logged("generation_ended", 998.0, step=100, cause="node lost")
    found = status([*START, ended], None, {"n1": 1.0, "n2": 1.0}, NOW)
    assert (found["state"], found["world_size"], found["workers"]) == ("running", 0, [])


def test_a_young_step_means_running_until_the_last_event():
    """The nodes meet in another folder, so the run directory has no heartbeats."""
    young, old = (StepLine(step=9, time=time, generation=1) for time in (995.0, 985.0))
    assert status(START, young, {}, NOW)["state"] == "running"
    assert status(START, old, {}, NOW)["state"] == "interrupted"
    stopped = [*START, logged("run_interrupted", 996.0, step=9)]
    assert status(stopped, young, {}, NOW)["state"] == "drained"


@pytest.mark.parametrize("ended", ["run_failed", "run_interrupted"])
def test_a_generation_that_resumed_outweighs_the_end_before_it(ended):
    """Events of an earlier start stay in the log for ever.

    The agent that resumes is a new node to the log, and the old node's heartbeat does not count.
    """
    again = [
        logged(ended, 960.0),
        logged("generation_started", 970.0, 2, world_size=1, nodes=["n1-again"], cause="resume"),
    ]

    assert status([*START, *again], None, {"n1": 40.0, "n1-again": 0.1}, NOW)["state"] == "running"
    assert status([*START, *again], None, {"n1": 0.1, "n1-again": 99.0}, NOW)["state"] == "interrupted"


@pytest.mark.parametrize("ended", ["run_failed", "run_interrupted"])
def test_a_node_that_left_alone_is_silent_about_what_follows(ended):
    """Its last event comes late: the others, which train on, have saved its state first."""
    left = [
        *START,
        logged("generation_started", 960.0, 2, world_size=1, nodes=["n1"], cause="node left"),
        logged(ended, 965.0, node="n2"),
    ]

    assert status(left, None, {"n1": 0.1, "n2": 30.0}, NOW)["state"] == "running"
    assert status(left, StepLine(step=9, time=964.0, generation=2), {}, 966.0)["state"] == "running"
    assert status(left, None, {"n1": 30.0, "n2": 30.0}, NOW)["state"] == "interrupted"


def test_workers_of_an_older_generation_are_not_listed():
    later = [
        logged("generation_started", 960.0, 2, world_size=2, nodes=["n1", "n2"], cause="failure"),
        logged("worker_started", 961.0, 2, rank=0, pid=20),
        logged("worker_started", 961.0, 2, rank=1, pid=21),
        logged("worker_exited", 970.0, 2, rank=1, pid=21, code=1, signal=None, victim=False),
    ]

    assert status([*START, *later], None, {"n1": 0.1}, NOW)["workers"] == [
        {"rank": 0, "node": "n1", "pid": 20}
    ]


def test_a_run_ended_early_by_its_recipe_is_finished():
    """Also the report; and an end that was taken back (its step is not the last one) is none."""
    end = logged("stopped", 989.0, step=9, steps=560, reason="enough")
    finished = logged("run_finished", 990.0, steps=9, epochs=0, digest="d")
    found = status([*START, end, finished], StepLine(step=9), {}, NOW)
    assert (found["state"], found["step"], found["steps"]) == ("finished", 9, 560)
    assert found["stopped"] == {"step": 9, "steps": 560, "reason": "enough"}
    assert asdict(viewed([*START, end, finished]).stopped) == found["stopped"]

    later = logged("run_finished", 995.0, steps=560, epochs=8, digest="d")
    assert status([*START, end, later], StepLine(step=560), {}, NOW)["stopped"] is None
    assert status([*START, end], StepLine(step=9), {}, NOW)["stopped"] is None
