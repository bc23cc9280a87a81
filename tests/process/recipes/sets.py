"""Parameter groups are built in the order of a set of strings, each with a rate of its own.

SETS_STOPS: the number of the step in which the agent gets SIGTERM, and after which it drains.
"""

import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic
from elastic.config import environment

run = elastic.start(seed=3, global_batch=8, shards=4)
parts = {name: nn.Linear(4, 4) for name in ("stem", "body", "neck", "head", "tail", "bias", "gate", "norm")}
model = nn.Sequential(*parts.values())
groups = [{"params": parts[name].parameters(), "lr": 0.01 * (1 + i)} for i, name in enumerate(set(parts))]
optimizer = torch.optim.SGD(groups, momentum=0.9)
inputs = torch.randn(32, 4)
data = run.data(TensorDataset(inputs), epochs=2)
for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    if os.environ.get("SETS_STOPS") == str(step.number):
        os.kill(environment.read().agent.pid, signal.SIGTERM)
        while not run._page.drain:
            time.sleep(0.01)
    step.mean_loss(lambda batch: (model(batch.data[0]) - batch.data[0]).pow(2).mean())
    optimizer.step()
