"""A tracker: each step that counts is reported once, whatever was done again.

`run.on_step` calls a function on rank 0 with the record of a step when that step counts:
docs/operations.md, Trackers. The script begins again after each fault, so the name of the tracker's
own run is kept in the run directory.

    elastic-train examples/tracker.py                            # steps.csv in the run directory
    elastic-train examples/tracker.py -- --tracker wandb         # or mlflow
"""

import argparse
import csv

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--tracker", choices=("table", "wandb", "mlflow"), default="table")
tracker = parser.parse_args().tracker

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

run = elastic.start(seed=0, global_batch=128, shards=8)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = run.data(train, epochs=2)
state = elastic.State(model=model, optimizer=optimizer)
kept = run.path(tracker)  # with a URL as run directory, a file of this node: choose a name yourself

if tracker == "wandb" and run.is_first:
    import wandb

    begun = wandb.init(project="digits", id=kept.read_text() if kept.exists() else None, resume="allow")
    kept.write_text(begun.id)
elif tracker == "mlflow" and run.is_first:
    import mlflow

    begun = mlflow.start_run(run_id=kept.read_text() if kept.exists() else None)
    kept.write_text(begun.info.run_id)


@run.on_step
def track(record):
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    if tracker == "wandb":
        wandb.log(numbers, step=record["step"])
    elif tracker == "mlflow":
        mlflow.log_metrics(numbers, step=record["step"])
    else:
        with run.path("steps.csv").open("a", newline="") as file:
            csv.writer(file).writerow([record["step"], record["loss"], record["norm"]])


for step in run.steps(data, state):
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    step.log(loss=loss, norm=norm)
