"""examples/tracker.py through a kill that costs steps: W&B and MLflow are small stand-ins that
have the few functions which it calls.
"""

import json
import sys
from pathlib import Path

import pytest
import run_records

pytestmark = pytest.mark.process
EXAMPLE = Path(__file__).parents[2] / "examples" / "tracker.py"
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
    id = "begun"

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
        run_id = "begun"

def start_run(run_id=None):
    note("init", id=run_id)
    return Run()

def log_metrics(numbers, step):
    note("log", numbers, step=step)
""",
}


def goes_on_and_logs_each_step_once(tracker: str, drill, folder: Path) -> None:
    calls, libraries = folder / "calls", folder / "site-packages"
    libraries.mkdir()
    (libraries / f"{tracker}.py").write_text(STAND_INS[tracker])
    words = ["--run-dir", drill.run.url, "--save-every", "4steps", "--snapshot-every", "off"]
    words += ["--faults", "step 7 rank 0 backward: kill", "--", "--tracker", tracker]
    env = {"PYTHONPATH": str(libraries), "CALLS": str(calls)}  # which a new interpreter reads
    agent = drill.execute([sys.executable, "-m", "elastic.cli", str(EXAMPLE), *words], env)
    agent.ends_with(0)
    assert drill.values("restored", "lost_steps")[-1] in ((2,), (6,)), drill.output  # from step 4, or 0
    said = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [each["named"]["id"] for each in said if each["call"] == "init"] == [None, "begun"]
    logged = [(each["named"]["step"], each["words"][0]) for each in said if each["call"] == "log"]
    lines = run_records.lines(drill.run.metrics)
    assert [(step, record["loss"], record["norm"]) for step, record in logged] == [
        (line["step"], line["loss"], line["norm"]) for line in lines
    ]
    assert [step for step, _ in logged] == list(range(1, 29))
    assert not any("chain" in record for _, record in logged)


def test_the_example_for_wandb_goes_on_in_its_run_and_logs_each_step_once(drill, tmp_path):
    goes_on_and_logs_each_step_once("wandb", drill, tmp_path)


def test_the_example_for_mlflow_goes_on_in_its_run_and_logs_each_step_once(drill, tmp_path):
    goes_on_and_logs_each_step_once("mlflow", drill, tmp_path)
