"""Fine-tuning: pretrained layers that are frozen at first, and a new head.

    elastic-train examples/classification.py
    elastic-train examples/fine_tuning.py --from runs/classification:model

`--from RUN:model` fills the entry `model` alone, so the pretrained network is built as it was
there, and the new head is an entry of its own. Without `--from` the network begins at random.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
is_even = torch.tensor(digits.target % 2 == 0).long()

run = elastic.start(seed=0, global_batch=128, shards=8)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Linear(16 * 9, 10),
).to(run.device)
body, head = model[:-1], nn.Linear(16 * 9, 2).to(run.device)
model[-1].requires_grad_(False)  # the old head: nothing updates it
groups = [{"params": list(head.parameters()), "lr": 1e-2}, {"params": list(body.parameters()), "lr": 1e-3}]
optimizer = torch.optim.AdamW(groups)
data = run.data(TensorDataset(images, is_even), epochs=4)
state = elastic.State(model=model, head=head, optimizer=optimizer)

for step in run.steps(data, state):
    # What is trained follows from the step, so a worker that takes over finds it alike.
    body.requires_grad_(step.epoch >= 2)
    body.train(step.epoch >= 2)
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(head(body(batch.data[0])), batch.data[1]))
    optimizer.step()
    step.log(loss=loss)
