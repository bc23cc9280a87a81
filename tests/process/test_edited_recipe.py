"""A recipe that builds other objects than when its state was saved is told so, and what to do."""

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# Values in place of an optimizer: torch's own import a compiler, which takes seconds.
RECIPE = """
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import elastic

chosen = json.loads(Path(__file__).with_name("chosen.json").read_text())
run = elastic.start(seed=0, global_batch=4, shards=2)
net = torch.nn.Linear(2, chosen["width"], bias=False)
values = elastic.Values(rate=chosen["rate"])
data = run.data(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), epochs=4)
kept = elastic.State(net=net, values=values)
for step in run.steps(data, kept):
    if step.number == chosen["stop"]:
        os.kill(run._worker.link.pid, signal.SIGTERM)  # the agent's
        while not run._worker.page.drain:
            time.sleep(0.01)
    step.mean_loss(lambda batch: net(batch.data[0]).square().mean())
    with torch.no_grad():
        net.weight -= values.rate * net.weight.grad
"""


@pytest.fixture
def edits(drill):
    """Starts the recipe under chosen settings, with a plan of faults."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(RECIPE)

    def start(faults="", **chosen):
        (drill.folder / "chosen.json").write_text(
            json.dumps({"width": 1, "rate": 0.1, "stop": None} | chosen)
        )
        plan = ("--faults", faults) if faults else ()
        return drill.start("--snapshot-every", "1", "--save-every", "1steps", *plan, recipe=recipe)

    return start


def test_edited_settings_are_told_once_the_saved_stay(edits, drill):
    """Interrupted after step 2, a file of settings edited, a worker killed in step 5."""
    edits(stop=2).ends_with(75)
    agent = edits("step 5 rank 0 backward: kill", rate=0.5)
    agent.ends_with(0)

    assert agent.output.count("warning: the recipe now builds other settings") == 1
    assert "values.rate 0.1, not 0.5" in agent.output
    assert f"elastic-train RECIPE --from {drill.run.url} --run-dir NEW" in agent.output
    assert drill.values("settings_ignored", "step", "settings") == [(2, ["values.rate 0.1, not 0.5"])]


def test_a_misfit_is_named_and_verify_finds_no_damage(edits, drill):
    """A wider layer. Nothing is changed: the recipe as it was goes on."""
    edits(stop=2).ends_with(75)
    agent = edits(width=3)
    agent.ends_with(76)

    assert "does not fit what the recipe builds: net does not take it" in agent.output
    assert "size mismatch for weight" in agent.output
    assert "torch.Size([3, 2]). Put the recipe back and give the same command" in agent.output
    assert drill.inspects("verify", drill.run.url)[0] == 0
    edits().ends_with(0)


def test_a_misfit_in_memory_is_saved_before_the_run_ends(drill, undisturbed, recipes):
    """The recipe is edited while it trains, and its worker dies before anything was saved. The
    edit is taken back, and the run goes on at the next step.
    """
    recipe = drill.folder / "recipe.py"
    text = (recipes / "tiny.py").read_text()
    recipe.write_text(text)
    options = ("--snapshot-every", "1", "--save-every", "1000steps")
    drill.shut(10)
    agent = drill.start(*options, recipe=recipe)
    drill.stands(10, ranks=1)
    recipe.write_text(text.replace("96", "97"))
    drill.kill_worker(0, generation=1)
    agent.ends_with(76)
    assert "the snapshot of step 9 does not fit what the recipe builds" in agent.output
    drill.happens("checkpoint_committed", step=9)

    recipe.write_text(text)
    drill.open(10)
    drill.ends_like(undisturbed, drill.start(*options, recipe=recipe))
    assert drill.values("restored", "step", "lost_steps", "source") == [(0, 0, "none"), (9, 0, "checkpoint")]
