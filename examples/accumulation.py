"""Gradient accumulation: a large batch on little memory.

A step goes forward and backward one shard at a time, and only one shard's graph is in memory. So
the loop has no `if step % 4 == 0` and no `loss / 4`: for a batch four times as large, the global
batch and the shards are four times as many.

    elastic-train examples/accumulation.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

SAMPLES_AT_ONCE, ACCUMULATED = 16, 32

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

run = elastic.start(seed=0, global_batch=SAMPLES_AT_ONCE * ACCUMULATED, shards=ACCUMULATED)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = run.data(train, epochs=6)
state = elastic.State(model=model, optimizer=optimizer)

for step in run.steps(data, state):
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()  # mean_loss has replaced .grad: no zero_grad
    step.log(loss=loss)
