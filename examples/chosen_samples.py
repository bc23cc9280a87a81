"""Samples that the training itself chooses: the hardest ones more often (active learning, pseudo
labels and curricula by loss work alike).

`run.data(order=...)` is for an order that follows from the epoch alone. What the loop chooses is
part of the state: it is kept in `elastic.Values`, and the dataset reads it there.

    elastic-train examples/chosen_samples.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import elastic

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)

run = elastic.start(seed=0, global_batch=128, shards=8)
values = elastic.Values(chosen=list(range(len(images))))


class Chosen(Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        sample = values.chosen[index % len(values.chosen)]
        return images[sample], labels[sample]


model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = run.data(Chosen(), epochs=4)  # workers=0: loading processes would not see later choices
state = elastic.State(model=model, optimizer=optimizer, values=values)

for step in run.steps(data, state):
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
    step.log(loss=loss)
    if step.ends_epoch:
        with torch.no_grad():  # on every rank, the same
            scores = model(images.to(run.device))
        losses = nn.functional.cross_entropy(scores, labels.to(run.device), reduction="none")
        values.chosen = losses.topk(len(images) // 2).indices.tolist()
