"""A line of metrics says what a step was: its loss, its seconds, and whom the others waited for.

A step's own overhead is counted in calls of Python and in waits for the device, not in seconds,
beside the same step in plain PyTorch. What a step no longer needs lowers these numbers.
"""

import json

import pytest
import run_records

from elastic.observe.goodput import BETWEEN_STEPS

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_the_rank_that_stood_still_in_a_step_is_its_slowest(drill, undisturbed):
    """Once each of two ranks, in different parts of the step: for 2 s, while the other waits."""
    plan = "step 9 rank 1 forward: pause 2s; step 15 rank 0 optimizer: pause 2s"
    drill.ends_like(undisturbed, drill.start("--nproc-per-node", "2", "--faults", plan))
    lines = {line["step"]: line for line in run_records.lines(drill.run.metrics)}
    assert "slowest_rank" not in lines[1]  # nothing was measured yet
    # What follows the sum of a step counts to the next one.
    for step, rank in [(9, 1), (16, 0)]:
        assert lines[step]["slowest_rank"] == rank
        assert lines[step]["slowest_s"] >= 2


def test_an_evaluation_is_no_part_of_a_step(drill, recipes):
    """The run does nothing but evaluate, and logs another loss than `mean_loss` gave. A hook on a
    gradient is said once.
    """
    agent = drill.start(recipe=recipes / "evaluating.py")
    agent.ends_with(0)
    assert agent.output.count("model.weight has a hook on its gradient") == 1
    _, report = drill.inspects("report", drill.run.url)
    lines = run_records.lines(drill.run.metrics)
    # That of the last step comes before its line, as all do; what is before the first is the start.
    took_s = sum(line["took_s"] for line in lines[1:])
    assert report["badput_s"][BETWEEN_STEPS] >= 0.9 * took_s
    assert all(line["seconds"] >= 0 for line in lines)
    assert [line["loss"] for line in lines] == [pytest.approx(100.0 + number) for number in range(1, 7)]


def test_a_step_waits_for_the_device_once_and_makes_few_calls(drill, recipes, tmp_path):
    """It reads the loss, the norms, the requests and what buffers became all at once. The calls are
    those beyond plain PyTorch's: of a step, of a parameter, and of a shard with its 14 parameters.
    """

    def calls(**settings):
        settings["out"] = str(tmp_path / "counts.json")
        options = ["--run-dir", str(tmp_path / str(len(drill.agents))), "--save-every", "1000steps"]
        arguments = (json.dumps(settings),)
        drill.start(*options, recipe=recipes / "counted.py", arguments=arguments).ends_with(0)
        found = json.loads((tmp_path / "counts.json").read_text())
        assert found["ours"]["reads"] == 1
        return found["ours"]["calls"] - found["plain"]["calls"]

    one = calls(shards=1)
    assert one <= 484
    assert (calls(shards=1, layers=14) - one) / 14 <= 2
    assert (calls(shards=8) - one) / 7 <= 129
    calls(shards=4, sum=True)
