"""A dataset of one's own: random augmentation, sentences of any length, loading processes.

Random numbers of `__getitem__` come from the global generators (torch, random, numpy). The library
seeds them by epoch and sample: a sample is augmented alike wherever it is loaded, and otherwise in
the next epoch. A generator that the dataset keeps would begin again with each process.

    elastic-train examples/augmentation.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import elastic


class Rows(Dataset):
    """A digit as a sequence of its rows, of which some are cut off, with noise."""

    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.images / 16, dtype=torch.float32)
        self.labels = torch.tensor(digits.target)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        kept = int(torch.randint(6, 9, ()))
        return self.images[index][:kept] + 0.05 * torch.randn(kept, 8), self.labels[index]


def padded(samples):
    rows, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(each) for each in rows])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths, torch.stack(labels)


run = elastic.start(seed=0, global_batch=128, shards=8)
reader, head = nn.GRU(8, 32, batch_first=True).to(run.device), nn.Linear(32, 10).to(run.device)
optimizer = torch.optim.AdamW([*reader.parameters(), *head.parameters()], lr=1e-2)
data = run.data(Rows(), epochs=2, collate=padded, workers=2)
state = elastic.State(reader=reader, head=head, optimizer=optimizer)


def loss_of(batch):
    rows, lengths, labels = batch.data
    outputs, _ = reader(rows)
    last = outputs[torch.arange(len(rows), device=rows.device), lengths - 1]
    return nn.functional.cross_entropy(head(last), labels)


for step in run.steps(data, state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    step.log(loss=loss)
