"""More samples than are sorted are trained in no memory."""

import signal

import pytest
import run_records

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

BILLION = "12 1000000000"
STOP = 6
MOST_MIB = 3000  # one permutation of a billion samples takes 7630


def recipe_of(recipes, settings):
    return {"recipe": recipes / "large.py", "env": {"LARGE": settings}}


def drains(drill, agent, ranks):
    drill.stands(STOP, ranks=ranks)
    agent.signal(signal.SIGTERM)
    drill.happens("drain_requested")
    drill.open(STOP)
    agent.ends_with(75)


def result_of(drill):
    (finished,) = drill.events("run_finished")
    return finished["digest"], [line["loss"] for line in run_records.lines(drill.run.metrics)]


def test_a_billion_samples_give_one_result_and_fill_no_memory(drills, recipes, tmp_path):
    """One worker without a stop, beside two workers of which one is killed, and then three."""
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    recipe = recipe_of(recipes, BILLION)
    calm.start(**recipe).ends_with(0)
    stormy.shut(STOP)
    kill = ("--snapshot-every", "1", "--faults", "step 3 rank 1 backward: kill")
    drains(stormy, stormy.start("--nproc-per-node", "2", *kill, **recipe), ranks=2)
    stormy.start("--nproc-per-node", "3", **recipe).ends_with(0)

    assert result_of(stormy) == result_of(calm)
    for drill in (calm, stormy):
        assert max(line["most_mib"] for line in run_records.lines(drill.run.metrics)) < MOST_MIB
