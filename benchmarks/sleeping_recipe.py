"""The recipe of benchmarks/audit_share.py: a small model whose forward sleeps, of 4 shards a step.

Arguments: steps, seconds that each shard takes.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

steps, shard_s = int(sys.argv[1]), float(sys.argv[2])
run = elastic.start(seed=0, global_batch=16, shards=4)
model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
noise = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(256, 8, generator=noise), torch.randn(256, 1, generator=noise))
data = run.data(dataset, steps=steps)
state = elastic.State(model=model, optimizer=optimizer)


def loss(batch: elastic.Batch) -> torch.Tensor:
    time.sleep(shard_s)
    inputs, targets = batch.data
    error: torch.Tensor = model(inputs) - targets
    return error.square().mean()


for step in run.steps(data, state):
    step.mean_loss(loss)
    optimizer.step()
