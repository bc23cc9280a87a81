"""Averaged weights (EMA), which are evaluated and saved in the place of the model's own.

elastic-train examples/ema.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

run = elastic.start(seed=0, global_batch=100, shards=4)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
data = run.data(train, epochs=4)
# The average and its count of updates. A dict of copies in the script would be lost at a restart.
state = elastic.State(model=model, optimizer=optimizer, ema=ema)


def correct_of(batch):
    return (ema(batch.data[0]).argmax(1) == batch.data[1]).sum()


for step in run.steps(data, state):
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
    ema.update_parameters(model)  # in the loop, after the update; never inside forward
    step.log(loss=loss)
    if step.ends_epoch:
        step.log(accuracy=int(run.evaluate(held_out, correct_of)) / len(held_out))

if run.is_first:
    torch.save(ema.module.state_dict(), run.path("ema.pth"))
