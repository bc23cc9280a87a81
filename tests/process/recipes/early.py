"""Draws random numbers before elastic.start; the first argument says what it does beside that.

seeded: it seeds torch's generator, and builds its model before elastic.start. unseeded: it builds
its model there without a seed.
"""

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

print("drawn", random.random(), np.random.rand(), flush=True)  # noqa: NPY002 - the global generator is the point
if sys.argv[1] != "unseeded":
    torch.manual_seed(5)
model = nn.Linear(4, 4)
model.weight.register_hook(lambda gradient: gradient)
run = elastic.start(seed=3, global_batch=8, shards=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = run.data(TensorDataset(torch.randn(16, 4)), epochs=1)
for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(lambda batch: (model(batch.data[0]) - batch.data[0]).pow(2).mean())
    optimizer.step()
