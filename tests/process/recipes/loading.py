"""A recipe whose samples are loaded by another process, which holds one of them at a gate.

TINY_GATES      Folder. The first time that it loads sample 100, the loading process makes the file
                `loading` and waits for the file `load`. (Other processes look at samples, too.)
                At SIGUSR1, which the recipe handles itself, a process makes `handled-<pid>`.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import elastic

HELD_SAMPLE = 100
HELD_S = 250.0


class Held(torch.utils.data.Dataset):
    def __init__(self, gates: Path) -> None:
        self.gates = gates

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        is_there = torch.utils.data.get_worker_info() is not None
        if index == HELD_SAMPLE and is_there and not (self.gates / "loading").exists():
            (self.gates / "loading").touch()
            deadline = time.monotonic() + HELD_S
            while not (self.gates / "load").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return torch.rand(16), torch.tensor(index % 8)


def main() -> None:
    gates = Path(os.environ["TINY_GATES"])
    signal.signal(signal.SIGUSR1, lambda *_: (gates / f"handled-{os.getpid()}").touch())
    run = elastic.start(seed=3, global_batch=16, shards=4)
    model = nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = run.data(Held(gates), epochs=4, workers=1)
    for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
        step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
        optimizer.step()


if __name__ == "__main__":
    main()
