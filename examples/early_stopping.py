"""Early stopping and a learning rate that falls on a plateau.

The best loss and the patience are numbers that the loop keeps: they live in `elastic.Values`. All
ranks see the same held-out loss, so all stop in the same step.

    elastic-train examples/early_stopping.py
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

PATIENCE = 2

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, held_out = TensorDataset(images[:400], labels[:400]), TensorDataset(images[400:], labels[400:])

run = elastic.start(seed=0, global_batch=80, shards=8)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
values = elastic.Values(best=math.inf, epochs_without_gain=0)
data = run.data(train, epochs=50)
state = elastic.State(model=model, optimizer=optimizer, plateau=plateau, values=values)


def losses_of(batch):
    return nn.functional.cross_entropy(model(batch.data[0]), batch.data[1], reduction="sum")


for step in run.steps(data, state):
    step.mean_loss(lambda batch: losses_of(batch) / len(batch.indices))
    optimizer.step()
    if step.ends_epoch:
        model.eval()
        loss = float(run.evaluate(held_out, losses_of)) / len(held_out)
        model.train()
        step.log(held_out=loss)
        plateau.step(loss)
        values.epochs_without_gain = 0 if loss < values.best else values.epochs_without_gain + 1
        values.best = min(values.best, loss)
        if values.epochs_without_gain == PATIENCE:
            run.stop(f"the held-out loss is above {values.best:.4f} for {PATIENCE} epochs")
