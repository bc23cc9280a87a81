"""Warm-up, cosine schedule and clipped gradients.

elastic-train examples/clipping_and_schedule.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

import elastic

WARM_UP = 10

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

run = elastic.start(seed=0, global_batch=128, shards=8)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = run.data(train, epochs=4)
warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=WARM_UP)
cosine = CosineAnnealingLR(optimizer, T_max=data.steps - WARM_UP)
scheduler = SequentialLR(optimizer, [warm_up, cosine], milestones=[WARM_UP])
# The scheduler counts steps, so it is part of the state. A rate that is computed from step.fraction
# or step.number needs no entry.
state = elastic.State(model=model, optimizer=optimizer, scheduler=scheduler)

for step in run.steps(data, state):
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # of the whole batch's gradient
    optimizer.step()
    scheduler.step()
    step.log(loss=loss, norm=norm, lr=scheduler.get_last_lr()[0])
