"""Its samples are drawn by weights. WEIGHED: "STEPS SAMPLES", as a file of settings could say."""

import os
from pathlib import Path

import torch
from tiny import wait_at_gate
from torch.utils.data import TensorDataset

import elastic

steps, samples = map(int, os.environ["WEIGHED"].split())
run = elastic.start(seed=5, global_batch=16, shards=4)
model, inputs = torch.nn.Linear(8, 2), torch.arange(640.0).reshape(80, 8)[:samples] / 640
data = run.data(TensorDataset(inputs), steps=steps, tail="pad", weights=torch.arange(samples))
for step in run.steps(data, elastic.State(model=model)):
    wait_at_gate(Path(os.environ["TINY_GATES"]), step.number, run.rank)
    step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
