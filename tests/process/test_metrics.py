"""A line of metrics says what a step was: its loss, its seconds, and whom the others waited for.

A step's own overhead is counted in calls of Python and in waits for the device, not in seconds,
beside the same step in plain PyTorch. What a step no longer needs lowers these numbers.
"""

import json
from statistics import median

FIRST = 4  # steps before look at more


def test_a_step_waits_for_the_device_once_and_makes_few_calls(drill, recipes, tmp_path):
    """It reads the loss, the norms, the requests and what buffers became all at once. The calls are
    those beyond plain PyTorch's, of a step with eight shards and 30 parameters.
    """
    counts = tmp_path / "counts.json"
    of_counts = {"recipe": recipes / "counted.py", "arguments": (str(counts),)}
    drill.start("--save-every", "1000steps", **of_counts).ends_with(0)
    ours, plain = (found[1:] for found in json.loads(counts.read_text()))
    for odd_or_even in (0, 1):
        assert median(each["reads"] for each in ours[FIRST + odd_or_even :: 2]) == 1
    calls, of_plain = (median(each["calls"] for each in found[FIRST::2]) for found in (ours, plain))
    assert calls - of_plain <= 1596
