"""A recipe that reports its steps, by each of the ways in TRACKED.

reports.jsonl, in the run directory, gets a line for each call: the generation and the record.
Other functions draw from every generator, raise, or steer the run.
"""

import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from tiny import generation_now, wait_at_gate
from torch import nn
from torch.utils.data import TensorDataset

import elastic
from elastic.errors import UsageError

calls = 0
newest = {}
WAYS = os.environ.get("TRACKED", "").split()
STEPS = 24


def draw(record: dict) -> None:
    global calls  # noqa: PLW0603
    calls += 1
    newest[record["step"]] = record["loss"]
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(1)
    np.random.default_rng().random()
    random.Random().random()


def fail(record: dict) -> None:
    words = f"no tracker answers at step {record['step']}"
    record.clear()
    raise ConnectionError(words)


run = elastic.start(seed=3, global_batch=16, shards=4)
gates = Path(os.environ.get("TINY_GATES", "no gates"))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = run.data(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), steps=STEPS)
state = elastic.State(model=model, optimizer=optimizer)
if "file" in WAYS and run.is_first:
    file = run.path("reports.jsonl").open("a", buffering=1)
    run.on_step(lambda record: file.write(json.dumps({"in_generation": generation_now()} | record) + "\n"))
if "draw" in WAYS:
    run.on_step(draw)
if "fail" in WAYS:
    run.on_step(fail)
if "steer" in WAYS:

    @run.on_step
    def steer(_record: dict) -> None:
        try:
            run.evaluate(data, lambda batch: batch.data[0].sum())
        except UsageError as error:
            print(error)
        model[0].weight.detach().add_(1)


for step in run.steps(data, state):
    wait_at_gate(gates, step.number, run.rank)
    step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
    step.log(rate=1 / step.number)
