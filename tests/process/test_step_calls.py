"""A step's overhead is counted in calls of Python and in waits for the device, not in seconds.

Beside the same step in plain PyTorch. A change that adds to a step, to a shard or to a parameter
shows here before a benchmark shows it; what a step no longer needs lowers these numbers.
"""

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

PARAMETERS_A_LAYER = 2


@pytest.fixture
def counted(drill, recipes, tmp_path):
    """Counts beyond plain PyTorch's, and numbers that a step reads."""

    def count(*, layers=7, shards=1, form="mean", options=()):
        out = tmp_path / "counts.json"
        words = ["--layers", str(layers), "--shards", str(shards), "--form", form, "--out", str(out)]
        options_of_run = ["--fresh"] * bool(drill.agents) + ["--save-every", "1000steps"]
        drill.start(*options_of_run, recipe=recipes / "counted.py", arguments=(*words, *options)).ends_with(0)
        found = json.loads(out.read_text())
        return found["ours"]["calls"] - found["plain"]["calls"], found["ours"]["reads"]

    return count


@pytest.mark.parametrize(
    "what",
    [{"form": "mean"}, {"form": "sum", "options": ["--norm"]}],
    ids=["a mean loss", "a sum with batch norm"],
)
def test_a_step_waits_for_the_device_once(counted, what):
    """Where it reads the loss, the norms, the requests and what buffers became, all at once."""
    assert counted(shards=4, **what)[1] == 1


def test_calls_of_a_step_a_shard_and_a_parameter_do_not_grow(counted):
    one, _ = counted()
    more_layers, _ = counted(layers=14)
    more_shards, _ = counted(shards=8)
    assert one <= 484
    assert (more_layers - one) / (7 * PARAMETERS_A_LAYER) <= 2
    # Of its 14 parameters, too.
    assert (more_shards - one) / 7 <= 129
