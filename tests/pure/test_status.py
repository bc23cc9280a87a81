from dataclasses import asdict

import pytest
from logged import logged

from elastic.observe.step_line import StepLine
from elastic.report.status import status as status_of

NOW = 1000.0


def status(events, newest, beat_ages_s, now):
    """What `status --json` prints: the frozen status as plain JSON."""
    return asdict(status_of(events, newest, beat_ages_s, now))


START = [
    logged("generation_started", 900.0, world_size=2, nodes=["n1", "n2"], cause="start"),
    logged("worker_started", 901.0, rank=1, pid=11, node="n2"),
    logged("worker_started", 901.0, rank=0, pid=10),
    logged("run_started", 902.0, steps=560, epochs=8),
    logged("checkpoint_committed", 950.0, step=100, size_bytes=1, seconds=0.1, digest="d"),
]


def test_a_live_run_tells_its_step_its_workers_and_its_newest_checkpoint():
    found = status(START, StepLine(step=120), {"n1": 0.5, "n2": 99.0}, NOW)

    assert found == {
        "state": "running",
        "step": 120,
        "steps": 560,
        "generation": 1,
        "world_size": 2,
        "workers": [{"rank": 0, "node": "n1", "pid": 10}, {"rank": 1, "node": "n2", "pid": 11}],
        "last_checkpoint": {"step": 100, "age_s": 50.0},
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
        (logged("run_finished", 990.0, steps=560, epochs=8, digest="d"), {"n1": 0.1}, "finished"),
    ],
)
def test_state_follows_from_the_last_word_and_the_signs_of_life(last, beat_ages_s, state):
    """A node that was drained a second ago is gone; that does not end a run on which another node still works."""
    assert status([*START, *([last] if last else [])], None, beat_ages_s, NOW)["state"] == state


def test_a_young_step_is_a_sign_of_life_until_somebody_says_goodbye():
    """The nodes meet in a folder of their own, so that no beat is seen here."""
    assert status(START, StepLine(step=9, time=995.0), {}, NOW)["state"] == "running"
    assert status(START, StepLine(step=9, time=985.0), {}, NOW)["state"] == "interrupted"
    stopped = [*START, logged("run_interrupted", 996.0, step=9)]
    assert status(stopped, StepLine(step=9, time=995.0), {}, NOW)["state"] == "drained"


@pytest.mark.parametrize("ended", ["run_failed", "run_interrupted"])
def test_an_end_that_was_resumed_from_is_history(ended):
    """The event of an earlier life of the run stays in the log for ever; a later generation outweighs it.

    The node that resumes is another one to the log, and what the old one left behind is no sign of life.
    """
    again = [
        logged(ended, 960.0),
        logged("generation_started", 970.0, 2, world_size=1, nodes=["n1-again"], cause="resume"),
    ]

    assert status([*START, *again], None, {"n1": 40.0, "n1-again": 0.1}, NOW)["state"] == "running"
    assert status([*START, *again], None, {"n1": 0.1, "n1-again": 99.0}, NOW)["state"] == "interrupted"


def test_workers_that_exited_or_belong_to_an_older_generation_are_not_listed():
    later = [
        logged("generation_started", 960.0, 2, world_size=2, nodes=["n1", "n2"], cause="failure"),
        logged("worker_started", 961.0, 2, rank=0, pid=20),
        logged("worker_started", 961.0, 2, rank=1, pid=21),
        logged("worker_exited", 970.0, 2, rank=1, pid=21, code=1, signal=None, victim=False),
    ]

    assert status([*START, *later], None, {"n1": 0.1}, NOW)["workers"] == [
        {"rank": 0, "node": "n1", "pid": 20}
    ]


def test_a_run_that_has_not_met_yet_has_no_numbers_but_all_keys():
    found = status([], None, {"n1": 0.1}, NOW)

    assert found == {
        "state": "running",
        "step": 0,
        "steps": None,
        "generation": 0,
        "world_size": 0,
        "workers": [],
        "last_checkpoint": None,
    }
