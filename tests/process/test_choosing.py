"""Chosen samples and evaluations give one result, whatever breaks, and other data are refused."""

import pytest
import run_records

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def result_of(drill):
    """The digest, the rate and loss of each epoch, and what the evaluation after the end gave."""
    (finished,) = drill.events("run_finished")
    lines = run_records.lines(drill.run.metrics)
    said = [line.partition("at the end ")[2] for line in drill.agents[-1].output.splitlines()]
    decided = [(line["held_out"], line["rate"]) for line in lines if "held_out" in line]
    return finished["digest"], [line["chain"] for line in lines], decided, [each for each in said if each]


def test_an_own_order_and_what_an_evaluation_decides_survive_a_kill_and_a_resume(drills, recipes, tmp_path):
    """One worker without a stop, beside two workers of which one is killed, and then three.

    The evaluation's bits reach the state through ReduceLROnPlateau and the choice of the best
    weights, and end the run early: one that depended on the number of workers would change the
    digest and the last step.
    """
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    recipe = {"recipe": recipes / "choosing.py", "arguments": ("order",), "env": {"CHOOSING": "40 70"}}
    calm.start(**recipe).ends_with(0)
    stormy.shut(9)
    kill = ("--snapshot-every", "1", "--faults", "step 5 rank 1 backward: kill")
    stormy.drains(stormy.start("--nproc-per-node", "2", *kill, **recipe), 9, ranks=2)
    stormy.start("--nproc-per-node", "3", **recipe).ends_with(0)

    expected = result_of(calm)
    assert result_of(stormy) == expected
    assert calm.values("stopped", "step", "steps") == stormy.values("stopped", "step", "steps") == [(24, 40)]
    assert len(expected[1]) == 24
    assert len({rate for _, rate in expected[2]}) > 1  # the evaluation did decide something
    assert expected[3]


def test_other_data_at_a_resume_are_refused_and_a_longer_run_says_so(drills, recipes, tmp_path):
    """The same command, and other settings that the recipe reads; its samples are drawn by weights.

    First the data set has another length, and nothing is trained; then the run becomes longer, and
    ends as one that had this length from the start.
    """

    def recipe(settings):
        weights = {"recipe": recipes / "choosing.py", "arguments": ("weights",)}
        return weights | {"env": {"CHOOSING": settings}}

    calm, drill = drills(tmp_path / "calm"), drills(tmp_path / "stopped")
    calm.start(**recipe("16 70")).ends_with(0)
    drill.shut(9)
    drill.drains(drill.start(**recipe("14 70")), 9)
    refused = drill.start(**recipe("14 80"))
    refused.ends_with(2)
    assert "samples (70 and 80), weights (" in refused.output
    assert f"elastic-train RECIPE --from {drill.run.url} --run-dir NEW" in refused.output
    assert drill.last_step == 9
    longer = drill.start(**recipe("16 70"))
    longer.ends_with(0)
    assert "this run was to have 14 steps (3 epochs), and the recipe now asks for 16 (4)" in longer.output
    assert result_of(drill) == result_of(calm)
