"""Mixed precision: the forward pass under autocast, with a gradient scaler.

The scaler changes its scale by what it saw, so it is part of the state. With bfloat16 it may be
left out, here and in `mean_loss`; float16 on a GPU needs it.

    elastic-train examples/mixed_precision.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

run = elastic.start(seed=0, global_batch=128, shards=8)
dtype = torch.float16 if run.device.type == "cuda" else torch.bfloat16
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(run.device.type)
data = run.data(train, epochs=4)
state = elastic.State(model=model, optimizer=optimizer, scaler=scaler)


def loss_of(batch):
    with torch.autocast(run.device.type, dtype):
        scores = model(batch.data[0])
    return nn.functional.cross_entropy(scores.float(), batch.data[1])


for step in run.steps(data, state):
    loss = step.mean_loss(loss_of, scaler=scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    step.log(loss=loss, scale=scaler.get_scale())
