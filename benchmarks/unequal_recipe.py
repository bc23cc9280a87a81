"""The recipe of benchmarks/unequal.py: 8 shards a step, which sleep or multiply matrices.

Arguments: steps, seconds that each shard sleeps, the size of the matrices, and `pinned` where each
worker runs on the core of its rank alone.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

steps, shard_s, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
run = elastic.start(seed=0, global_batch=16, shards=8)
if "pinned" in sys.argv:
    os.sched_setaffinity(0, {run.rank})
model = nn.Sequential(nn.Linear(8, size), nn.Linear(size, size), nn.Linear(size, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
noise = torch.Generator().manual_seed(0)
data = run.data(TensorDataset(torch.randn(256, 8, generator=noise)), steps=steps)


def loss(batch: elastic.Batch) -> torch.Tensor:
    time.sleep(shard_s)
    inputs = batch.data[0].repeat(size // 8, 1)
    output: torch.Tensor = model(inputs)
    return output.square().mean()


for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(loss)
    optimizer.step()
