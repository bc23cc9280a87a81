"""The examples of docs/tracking.md, through a kill: the CSV one as it is, the others against small
stand-ins that have the few functions which they call.
"""

import csv
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import run_records

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
STEPS = 12
RECIPE = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import elastic

run = elastic.start(seed=3, global_batch=16, shards=4)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = run.data(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), steps=12)
state = elastic.State(model=model, optimizer=optimizer)
gates = Path(os.environ["TINY_GATES"])
{example}

for step in run.steps(data, state):
    if (gates / f"gate-{{step.number}}").exists():
        (gates / f"at-{{step.number}}-rank{{run.rank}}").touch()
        while not (gates / f"go-{{step.number}}").exists():
            time.sleep(0.01)
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
    step.log(rate=0.05)
"""
CALLS = """
import json, os

def note(name, *words, **named):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps({"call": name, "words": words, "named": named}) + "\\n")
"""
STAND_INS = {
    "wandb": CALLS
    + """
class Run:
    id = "w1"

def init(**named):
    note("init", **named)
    return Run()

def log(record, step):
    note("log", record, step=step)
""",
    "mlflow": CALLS
    + """
class Run:
    class info:
        run_id = "m1"

def start_run(run_id=None):
    note("start_run", run_id=run_id)
    return Run()

def log_metrics(numbers, step):
    note("log_metrics", numbers, step=step)
""",
}


def example(title: str) -> str:
    text = (ROOT / "docs" / "tracking.md").read_text()
    return re.search(rf"## {re.escape(title)}\n\n```python\n(.*?)```", text, re.DOTALL)[1]


def train_through_a_kill(drill, tmp_path: Path, title: str) -> list[dict]:
    """Returns what the stand-in of the tracker was asked for."""
    recipe, calls, libraries = tmp_path / "recipe.py", tmp_path / "calls", tmp_path / "site-packages"
    recipe.write_text(RECIPE.format(example=example(title)))
    libraries.mkdir()
    for name, text in STAND_INS.items():
        (libraries / f"{name}.py").write_text(text)
    drill.shut(5, 7)
    env = {"PYTHONPATH": str(libraries), "CALLS": str(calls)}
    words = ["--run-dir", drill.run.url, "--save-every", "4steps", "--snapshot-every", "off"]
    agent = drill.execute([sys.executable, "-m", "elastic.cli", str(recipe), *words], env)
    drill.stands(5, ranks=1)
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(7, ranks=1)
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.open(7)
    agent.ends_with(0)
    assert drill.values("restored", "lost_steps")[-1] == (2,), drill.output
    assert "note:" not in agent.output
    return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def lines(drill) -> list[dict]:
    return run_records.lines(drill.run.metrics)


def test_the_csv_example_has_each_step_once(drill, tmp_path):
    assert train_through_a_kill(drill, tmp_path, "A CSV file") == []

    with (drill.run.local / "steps.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "loss"]
    assert [(int(step), float(loss)) for step, loss in rows] == [
        (line["step"], line["loss"]) for line in lines(drill)
    ]
    assert len(rows) == STEPS


def test_the_example_for_wandb_goes_on_in_its_run_and_logs_each_step_once(drill, tmp_path):
    calls = train_through_a_kill(drill, tmp_path, "W&B")

    begun = [call["named"] for call in calls if call["call"] == "init"]
    assert [each["id"] for each in begun] == [None, "w1"]
    assert all(each["resume"] == "allow" for each in begun)
    logged = [(call["named"]["step"], call["words"][0]) for call in calls if call["call"] == "log"]
    assert [step for step, _ in logged] == list(range(1, STEPS + 1))
    assert [(record["step"], record["loss"], record["rate"]) for _, record in logged] == [
        (line["step"], line["loss"], 0.05) for line in lines(drill)
    ]


def test_the_example_for_mlflow_goes_on_in_its_run_and_logs_each_step_once(drill, tmp_path):
    calls = train_through_a_kill(drill, tmp_path, "MLflow")

    begun = [call["named"]["run_id"] for call in calls if call["call"] == "start_run"]
    assert begun == [None, "m1"]
    logged = [(call["named"]["step"], call["words"][0]) for call in calls if call["call"] == "log_metrics"]
    assert [step for step, _ in logged] == list(range(1, STEPS + 1))
    assert [numbers["loss"] for _, numbers in logged] == [line["loss"] for line in lines(drill)]
    assert all("chain" not in numbers for _, numbers in logged)
