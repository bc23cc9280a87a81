"""The first generation makes a teacher, which later ones find in a file; then data are split."""

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import elastic

run = elastic.start(seed=0, global_batch=16, shards=4)
path = run.path("teacher.pt")
if not path.exists():
    torch.save(torch.randn(8, 2), path)
inputs = torch.arange(800.0).reshape(100, 8) / 800
train, _ = random_split(TensorDataset(inputs), [80, 20])

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in run.steps(run.data(train, steps=8), elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
    optimizer.step()
