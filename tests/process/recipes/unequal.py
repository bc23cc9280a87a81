"""Rank 1 is slower, as far as is measured; a process loads, and there is an evaluation."""

from itertools import count

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic
from elastic.train.step.parts import Pace

CLASSES, STEPS, looks = 3, 64, count()
# However loaded this machine is: a rank works so long between two looks.
Pace._worked_s = lambda pace: (0.04, 0.1)[pace._rank] * next(looks)


class Noisy(Dataset):
    """Each sample draws from the keyed generators."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(4) + index / 64, index % CLASSES


run = elastic.start(seed=0, global_batch=16, shards=8)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, held = run.data(Noisy(), steps=STEPS, workers=1), Noisy()


def loss_of(batch):
    return nn.functional.cross_entropy(model(batch.data[0]), batch.data[1])


for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.number % 16 == 0:
        step.log(held=run.evaluate(held, lambda batch: model(batch.data[0]).sum(), batch_size=16))
