"""The recipe of benchmarks/soak.py: any part of its state that is not restored changes the digest.

A small model with short steps, dropout, BatchNorm, momentum and a schedule. Argument: epochs.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

epochs = int(sys.argv[1])
run = elastic.start(seed=11, global_batch=32, shards=4)
draw = torch.Generator().manual_seed(1)
inputs, labels = torch.randn(640, 16, generator=draw), torch.randint(8, (640,), generator=draw)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 * epochs)
data = run.data(TensorDataset(inputs, labels), epochs=epochs)
for step in run.steps(data, elastic.State(model=model, optimizer=optimizer, schedule=schedule)):
    step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
    schedule.step()
