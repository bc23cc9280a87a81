"""`elastic-train check` finds what a recipe keeps outside its State, and which run shows it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.check import plan

pytestmark = pytest.mark.process

RECIPE = """
import torch
from torch.utils.data import TensorDataset
import elastic

run = elastic.start(seed=0, global_batch=16, shards=4)
inputs = torch.randn(64, 6)
data = run.data(TensorDataset(inputs, inputs.sum(1, keepdim=True)), epochs=8)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = elastic.State(model=model, optimizer=optimizer)
count = 0
for step in run.steps(data, state):
    count += 1
    optimizer.param_groups[0]["lr"] = 0.1 / count
    step.mean_loss(lambda batch: (model(batch.data[0]) - batch.data[1]).square().mean())
    optimizer.step()
    {last_line}
"""


def check(recipe: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elastic.cli", "check", str(recipe), *words],
        cwd=recipe.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_check_finds_a_variable_that_no_restart_restores(tmp_path):
    """A counter of the loop sets the learning rate: exact until a process is replaced."""
    recipe = tmp_path / "counting.py"
    recipe.write_text(RECIPE.format(last_line="step.log(count=count)"))

    done = check(recipe, "--steps", "8", "--json")

    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert not found["same"]
    assert (found["steps"], found["steps_of_run"]) == (8, 32)
    by_proof = {each["proof"]: each for each in found["proofs"]}
    assert all(by_proof[proof]["same"] for proof in (plan.GRADIENT, plan.AGAIN, plan.MORE_WORKERS)), found
    assert by_proof[plan.GRADIENT]["note"].endswith("of its norm from that of the whole batch")
    for proof in (plan.KILLED, plan.DRAINED, plan.CHECKPOINT):
        assert by_proof[proof]["failure"] is None
        assert by_proof[proof]["entry"].startswith("model."), found
    assert "elastic.Values" in found["cause"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counting.py"]


def test_a_recipe_that_does_not_train_is_not_compared(tmp_path):
    recipe = tmp_path / "broken.py"
    recipe.write_text(RECIPE.format(last_line="raise SystemExit('no more')"))

    done = check(recipe)

    assert done.returncode == 1
    assert "no more" in done.stderr
    assert "nothing was compared" in done.stderr


def test_a_script_without_the_library_is_refused(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("print('hello')")

    done = check(script)

    assert done.returncode == 2
    assert "imports elastic" in done.stderr
