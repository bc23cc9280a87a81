"""A recipe on more samples than are sorted, each made from its number; its arithmetic is exact.

Environment variables, besides TINY_GATES of tiny.py:

LARGE  "STEPS SAMPLES"

It logs the most memory that its process ever held, in MiB.
"""

import os
import resource
from pathlib import Path

import torch
from tiny import wait_at_gate
from torch import nn

import elastic


class Numbers(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index >> place & 1 for place in range(32)], dtype=torch.float32)


def main() -> None:
    steps, samples = map(int, os.environ["LARGE"].split())

    run = elastic.start(seed=9, global_batch=16, shards=4)
    model = nn.Linear(32, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = run.data(Numbers(samples), steps=steps)
    gates = Path(os.environ.get("TINY_GATES", "no gates"))
    for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
        wait_at_gate(gates, step.number, run.rank)
        loss = step.mean_loss(lambda batch: (model(batch.data) * batch.data.sum(1, keepdim=True)).mean())
        optimizer.step()
        step.log(loss=loss, most_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


if __name__ == "__main__":
    main()
