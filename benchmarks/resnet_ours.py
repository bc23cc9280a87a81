"""The recipe of benchmarks/snapshot_cost.py: ResNet-18 on noise.

Arguments: shards, samples a shard, steps of an epoch, and epochs, if not one.
"""

import sys

import torch
import torchvision
from torch.utils.data import TensorDataset

import elastic

shards, samples, steps, epochs = map(int, [*sys.argv[1:], "1"][:4])
run = elastic.start(seed=0, global_batch=shards * samples, shards=shards)
noise = torch.Generator().manual_seed(0)
images = torch.randn(steps * shards * samples, 3, 32, 32, generator=noise)
labels = torch.randint(0, 10, (len(images),), generator=noise)
model = torchvision.models.resnet18(num_classes=10).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = run.data(TensorDataset(images, labels), epochs=epochs)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(data, state):
    step.mean_loss(lambda batch: torch.nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
