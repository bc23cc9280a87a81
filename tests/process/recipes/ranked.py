"""A recipe that is not exact: from step 5 on rank 1 draws noise of its own into a weight."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

NOISY_FROM = 5


run = elastic.start(seed=1, global_batch=8, shards=4)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = run.data(TensorDataset(torch.arange(32.0).reshape(16, 2) / 32), epochs=4)
for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
    optimizer.step()
    step.log(both=1, own=run.rank)
    if step.number >= NOISY_FROM and run.rank == 1:
        noise = torch.Generator()
        noise.seed()
        with torch.no_grad():
            model.weight += torch.rand(1, 2, generator=noise)
