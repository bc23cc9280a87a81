"""Classification with a held-out set: accuracy after each epoch, the best weights kept.

elastic-train examples/classification.py
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
train, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

run = elastic.start(seed=0, global_batch=100, shards=4)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Linear(16 * 9, 10),
).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
best, values = copy.deepcopy(model), elastic.Values(correct=0)
data = run.data(train, epochs=4)
# All that must survive a fault: what is not named here begins again as the script builds it.
state = elastic.State(model=model, optimizer=optimizer, best=best, values=values)


def loss_of(batch):
    return nn.functional.cross_entropy(model(batch.data[0]), batch.data[1])


def correct_of(batch):
    return (model(batch.data[0]).argmax(1) == batch.data[1]).sum()


for step in run.steps(data, state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    step.log(loss=loss)
    if step.ends_epoch:
        model.eval()
        correct = int(run.evaluate(held_out, correct_of))  # the same number on every rank
        model.train()
        step.log(accuracy=correct / len(held_out))
        run.print(f"epoch {step.epoch}: {correct} of {len(held_out)} held-out digits are right")
        if correct > values.correct:
            values.correct = correct
            best.load_state_dict(model.state_dict())

if run.is_first:
    torch.save(best.state_dict(), run.path("best.pth"))
