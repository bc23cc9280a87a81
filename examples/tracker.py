"""A tracker: each step that counts is written to a table once, whatever was done again.

`run.on_step` calls a function on rank 0 with the record of a step when that step counts. W&B and
MLflow are used in the same way: docs/operations.md, Trackers.

    elastic-train examples/tracker.py
"""

import csv

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

run = elastic.start(seed=0, global_batch=128, shards=8)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = run.data(train, epochs=2)
state = elastic.State(model=model, optimizer=optimizer)
table = run.path("steps.csv")


@run.on_step
def track(record):
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["step", "loss", "norm", "seconds"])
        writer.writerow([record["step"], record["loss"], record["norm"], record["seconds"]])


for step in run.steps(data, state):
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    step.log(loss=loss, norm=norm)
