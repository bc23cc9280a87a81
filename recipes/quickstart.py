"""A classifier of digits: the whole of what a recipe needs."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)

run = elastic.start(seed=0, global_batch=128, shards=8)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(
    run.device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = run.data(TensorDataset(images, labels), epochs=10, tail="drop")
state = elastic.State(model=model, optimizer=optimizer)

for step in run.steps(data, state):
    loss = step.mean_loss(
        lambda batch: torch.nn.functional.cross_entropy(model(batch.data[0]), batch.data[1])
    )
    optimizer.step()
    step.log(loss=loss)
