"""A line of metrics says what a step was: its loss, its seconds, and whom the others waited for.

A step's own overhead is counted in calls of Python and in waits for the device, not in seconds,
beside the same step in plain PyTorch. What a step no longer needs lowers these numbers.
"""

import json


def test_a_step_waits_for_the_device_once_and_makes_few_calls(drill, recipes, tmp_path):
    """It reads the loss, the norms, the requests and what buffers became all at once. The calls are
    those beyond plain PyTorch's, of a step with eight shards and 28 parameters.
    """

    def calls(**settings):
        settings["out"] = str(tmp_path / "counts.json")
        options = ["--run-dir", str(tmp_path / str(len(drill.agents))), "--save-every", "1000steps"]
        arguments = (json.dumps(settings),)
        drill.start(*options, recipe=recipes / "counted.py", arguments=arguments).ends_with(0)
        found = json.loads((tmp_path / "counts.json").read_text())
        assert found["ours"]["reads"] == 1
        return found["ours"]["calls"] - found["plain"]["calls"]

    assert calls(shards=8, layers=14) <= 1440
    calls(shards=4, sum=True)
