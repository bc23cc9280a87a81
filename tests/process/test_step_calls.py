"""A step's own overhead, counted in calls of Python and in waits for the device, not in seconds.

Calls are those beyond the same step in plain PyTorch. What a step no longer needs lowers limits.
"""

import json
from statistics import median


def counts(drill, recipes, path, *arguments):
    """Of each step: ours, and in plain PyTorch. The first four look at more than later ones."""
    # A slow machine would take a snapshot of so small a state in each step.
    options = "--fresh", "--snapshot-every", "1000"
    drill.start(*options, recipe=recipes / "counted.py", arguments=(str(path), *arguments)).ends_with(0)
    return (found[1:] for found in json.loads(path.read_text()))


def test_a_step_makes_few_calls_of_python(drill, recipes, tmp_path):
    """Of a model with fourteen parameters and no buffers."""
    beyond = {}
    for shards in (1, 8):
        ours, plain = counts(drill, recipes, tmp_path / "counts.json", str(shards))
        calls, of_plain = (median(each["calls"] for each in found[4::2]) for found in (ours, plain))
        beyond[shards] = calls - of_plain
    # With what a slow machine asks of schedules in each step, and a fast one more rarely.
    assert beyond[1] <= 145
    assert beyond[8] <= 145 + 7 * 30


def test_a_step_waits_for_the_device_once(drill, recipes, tmp_path):
    """It reads the loss, the requests and what buffers became all at once; of a mean loss and of a
    sum.
    """
    ours, _ = counts(drill, recipes, tmp_path / "counts.json", "8", "buffers")
    for odd_or_even in (0, 1):
        assert median(each["reads"] for each in ours[4 + odd_or_even :: 2]) == 1
