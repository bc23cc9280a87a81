"""Several losses in one gradient, one of which couples all samples of the batch.

`step.sum` adds tensors over all shards; the loss is any function of the sums, and `step.backward`
takes the gradient of it. The cross entropy is an exact mean over weighted samples; the second loss
decorrelates the features over the whole global batch, which no shard could do alone.

    elastic-train examples/several_losses.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

run = elastic.start(seed=0, global_batch=128, shards=8)
encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)).to(run.device)
head = nn.Linear(16, 10).to(run.device)
optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=3e-3)
weights = torch.linspace(0.5, 1.5, 10, device=run.device)  # of the classes
data = run.data(train, epochs=3)
state = elastic.State(encoder=encoder, head=head, optimizer=optimizer)


def sums_of(batch):
    """In one tensor: the weighted loss, its weight, and the second moments of the features."""
    inputs, labels = batch.data
    features = encoder(inputs)
    losses = nn.functional.cross_entropy(head(features), labels, weight=weights, reduction="sum")
    return torch.cat([torch.stack([losses, weights[labels].sum()]), (features.T @ features).flatten()])


for step in run.steps(data, state):
    total = step.sum(sums_of)
    classes = total[0] / total[1]
    moments = total[2:].view(16, 16) / step.global_batch
    penalty = (moments - torch.eye(16, device=run.device)).square().mean()
    step.backward(classes + penalty)
    optimizer.step()
    step.log(loss=classes, penalty=penalty)
