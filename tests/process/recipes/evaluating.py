"""A recipe that evaluates in each step, logs how long that took, and a loss of its own. A parameter
has a hook on its gradient, which changes nothing.
"""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

STEPS = 6

run = elastic.start(seed=0, global_batch=8, shards=4)
model = nn.Linear(4, 1)
model.weight.register_hook(lambda gradient: gradient)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
samples = torch.arange(8 * STEPS * 4, dtype=torch.float32).reshape(-1, 4) / 100
data = run.data(TensorDataset(samples), epochs=1)
held = TensorDataset(samples[:8])


def loss_of(batch):
    return model(batch.data[0]).pow(2).mean()


for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(loss_of)
    optimizer.step()
    began_s = time.monotonic()
    run.evaluate(held, loss_of)
    step.log(loss=100.0 + step.number, took_s=time.monotonic() - began_s)
