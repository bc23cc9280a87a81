"""More samples than are sorted are trained in no memory, and a run keeps the order it began in."""

import json
import signal

import pytest
import run_records

from elastic.data.order import SORTED_UP_TO

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

BILLION = "12 1000000000"
LARGE = f"12 {SORTED_UP_TO + 1}"
STOP = 6
MOST_MIB = 3000  # one permutation of a billion samples takes 7630


def recipe_of(recipes, settings, **more):
    return {"recipe": recipes / "large.py", "env": {"LARGE": settings} | more}


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


def test_a_run_that_began_in_the_sorted_order_keeps_it(drills, recipes, tmp_path):
    """Its directory has the record of a version that sorted at every size, and no state yet.

    It stops, goes on from a checkpoint, and ends as a run whose own order is that sort; a new run
    has another one.
    """
    old, own, new = (drills(tmp_path / name) for name in ("old", "own", "new"))
    recipe = recipe_of(recipes, LARGE)
    beginning = {"samples": SORTED_UP_TO + 1, "epochs": 1, "steps": 12, "tail": "drop"}
    old.run.local.mkdir(parents=True)
    (old.run.local / "data.json").write_text(json.dumps(beginning))
    old.shut(STOP)
    drains(old, old.start("--nproc-per-node", "2", **recipe), ranks=2)
    old.start(**recipe).ends_with(0)
    own.start(**recipe_of(recipes, LARGE, LARGE_SORT="1")).ends_with(0)
    new.start(**recipe).ends_with(0)

    assert result_of(old) == result_of(own)
    assert result_of(old)[0] != result_of(new)[0]
