"""`elastic-train check` finds what a recipe keeps outside its State, and which run shows it."""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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


def check(recipe: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "elastic.cli", "check", str(recipe), *words],
        cwd=recipe.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_check_finds_a_variable_that_no_restart_restores(tmp_path):
    """A counter of the loop sets the learning rate: exact until a process is replaced."""
    recipe = tmp_path / "counting.py"
    recipe.write_text(RECIPE.format(last_line="step.log(count=count)"))

    done = check(recipe, "--steps", "6", "--json")

    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counting.py"]


def test_a_check_that_is_stopped_leaves_nothing(drill):
    """In the middle of a run. Every process of the check has the drill's folder as its own."""
    recipe = drill.folder / "stopped.py"
    recipe.write_text(RECIPE.format(last_line=""))
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket in it must not become too long
        words = [sys.executable, "-m", "elastic.cli", "check", str(recipe), "--steps", "3"]
        checking = drill.execute(words, {"TMPDIR": folder})
        drill.waits_for(lambda: "calm  " in checking.output, "the calm run")
        checking.signal(signal.SIGTERM)
        checking.ends_with(EXIT_INTERRUPTED)
        assert drill.alive() == []
        assert list(Path(folder).iterdir()) == []


def test_a_refusal_is_shown_as_its_sentence_and_the_recipes_line(tmp_path):
    """Of a step of the first run. JSON on stdout has it too."""
    recipe = tmp_path / "step.py"
    recipe.write_text(
        RECIPE.format(last_line="step.mean_loss(lambda batch: model(batch.data[0]).sum(), 1, 2)")
    )
    done = check(recipe, "--json")
    assert done.returncode == 2
    assert done.stderr.startswith("elastic-train: expected step.mean_loss(")
    document = json.loads(done.stdout)
    assert (document["result"], document["exit_code"]) == ("refused", 2)
    assert f"elastic-train: {document['error']}\n" == done.stderr
    assert f"\n  at {recipe}:16: " in done.stderr
    assert "Traceback" not in done.stderr
