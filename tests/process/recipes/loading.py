"""A recipe whose samples are loaded by another process, which waits at the gate `sample` with one.

At SIGUSR1, which the recipe handles itself, a process makes `handled-<pid>` in the folder of gates.
"""

import os
import signal
from pathlib import Path

import torch
from tiny import wait_at_gate
from torch import nn

import elastic

HELD_SAMPLE = 100


class Held(torch.utils.data.Dataset):
    def __init__(self, gates: Path) -> None:
        self.gates = gates

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Other processes look at samples, too.
        if index == HELD_SAMPLE and torch.utils.data.get_worker_info() is not None:
            wait_at_gate(self.gates, "sample", 0)
        return torch.rand(16), torch.tensor(index % 8)


gates = Path(os.environ["TINY_GATES"])
signal.signal(signal.SIGUSR1, lambda *_: (gates / f"handled-{os.getpid()}").touch())
run = elastic.start(seed=3, global_batch=16, shards=4)
model = nn.Linear(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = run.data(Held(gates), epochs=4, workers=1)
for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
