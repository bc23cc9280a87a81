"""A model that is cut over the workers: parameters, gradients and optimizer state (torch's FSDP2).

elastic-train examples/sharded.py --nproc-per-node 2
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic

digits = load_digits()
train = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

run = elastic.start(seed=0, global_batch=128, shards=8)
blocks = [nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)) for _ in range(3)]
model = nn.Sequential(nn.Linear(64, 128), *blocks, nn.Linear(128, 10)).to(run.device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # copied before it is cut
for net in model, average.module:  # as in torch: blocks first, then the model, then the optimizer
    for block in net[1:4]:
        run.fully_shard(block)
    run.fully_shard(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = run.data(train, epochs=4)
state = elastic.State(model=model, average=average, optimizer=optimizer)

for step in run.steps(data, state):
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    norm = elastic.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    average.update_parameters(model)
    step.log(loss=loss, norm=norm)

# All workers take part in a forward. `elastic-train export` writes the whole weights.
right = run.evaluate(train, lambda batch: (average(batch.data[0]).argmax(1) == batch.data[1]).sum())
run.print(f"{right / len(train):.1%} right")
