"""`elastic-train check` finds what a recipe keeps outside its State, and which run shows it."""

import json
import signal
import tempfile
from pathlib import Path

import pytest

from elastic.check import plan
from elastic.errors import EXIT_INTERRUPTED

RECIPE = """
import torch
from torch.utils.data import TensorDataset
import elastic

run = elastic.start(seed=0, global_batch=16, shards=4)
inputs = torch.randn(64, 6)
data = run.data(TensorDataset(inputs, inputs.sum(1, keepdim=True)), epochs=8)
model = torch.nn.Linear(6, 1)
count = 0
for step in run.steps(data, elastic.State(model=model)):
    count += 1
    step.mean_loss(lambda batch: (model(batch.data[0]) - batch.data[1]).square().mean())
    with torch.no_grad():  # torch's optimizers import a compiler, which takes seconds
        model.weight.sub_(0.1 / count * model.weight.grad)
    {last_line}
"""


@pytest.fixture
def check(drill):
    """Starts `elastic-train check` of the recipe with this last line."""

    def begin(last_line, *words, env=None):
        recipe = drill.folder / "recipe.py"
        recipe.write_text(RECIPE.format(last_line=last_line))
        return drill.command(["check", str(recipe), *words], env)

    return begin


def test_a_check_finds_a_variable_that_no_restart_restores(check, drill):
    """A counter of the loop sets the learning rate: exact until a process is replaced."""
    checking = check("step.log(count=count)", "--steps", "6", "--json")
    checking.ends_with(1)

    found = json.loads(checking.output)
    assert found["result"] == "differs"
    assert (found["steps"], found["steps_of_run"]) == (6, 32)
    by_proof = {each["proof"]: each for each in found["proofs"]}
    for proof in (plan.AGAIN, plan.MORE_WORKERS):
        assert by_proof[proof]["result"] == "exact", found
    differs = found["proofs"][-1]
    assert (differs["proof"], differs["failure"]) == (plan.CHECKPOINT, None)
    assert differs["entry"].startswith("the State's model."), found
    assert differs["step"] <= 6
    assert "elastic.Values" in found["cause"]
    assert found["not_compared"][:2] == [f"the run of {plan.KILLED}", "the steps after step 6"]
    assert {path.name for path in drill.folder.iterdir()} == {"gates", "printed-0", "recipe.py"}


def test_a_check_that_is_stopped_leaves_nothing(check, drill):
    """In the middle of a run. Every process of the check has the drill's folder as its own."""
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket in it must not become too long
        checking = check("", "--steps", "3", env={"TMPDIR": folder})
        drill.waits_for(lambda: "calm  " in checking.output, "the calm run")
        checking.signal(signal.SIGTERM)
        checking.ends_with(EXIT_INTERRUPTED)
        assert drill.alive() == []
        assert list(Path(folder).iterdir()) == []


def test_a_refusal_is_shown_as_its_sentence_and_the_recipes_line(check, drill):
    """Of a step of the first run. JSON on stdout has it too."""
    checking = check("step.mean_loss(lambda batch: model(batch.data[0]).sum(), 1, 2)", "--json")
    checking.ends_with(2)
    printed, _, refusal = checking.output.partition("\nelastic-train: ")
    document = json.loads(printed)
    assert (document["result"], document["exit_code"]) == ("refused", 2)
    assert document["error"] == refusal.rstrip()
    assert refusal.startswith("expected step.mean_loss(")
    assert f"\n  at {drill.folder}/recipe.py:16: " in refusal
    assert "Traceback" not in refusal
