"""A line of metrics says what a step was: its loss, its seconds, and whom the others waited for.

A step's own overhead is counted in calls of Python and in waits for the device, not in seconds,
beside the same step in plain PyTorch. What a step no longer needs lowers these numbers.
"""

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


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
