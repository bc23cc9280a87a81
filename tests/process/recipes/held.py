"""tiny.py with an evaluation in each step and code after the loop, which can be held for good.

HELD    "c-code" or "evaluation": where a worker is held in step 6 and after it, as long as the file
        `hang` is in TINY_GATES. It makes the file `held` there.
"""

import ctypes
import os
import time
from pathlib import Path

import torch
from tiny import wait_at_gate
from torch import nn
from torch.utils.data import TensorDataset

import elastic

GATES = Path(os.environ["TINY_GATES"])
STEPS = 12


def hold(where: str, step: int) -> None:
    if os.environ.get("HELD") == where and step >= 6 and (GATES / "hang").exists():
        (GATES / "held").touch()
        if where == "c-code":
            ctypes.PyDLL(None).sleep(10**6)  # which keeps the interpreter's lock
        while (GATES / "hang").exists():
            time.sleep(0.01)


run = elastic.start(seed=0, global_batch=8, shards=4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
samples = TensorDataset(torch.arange(8 * STEPS * 4, dtype=torch.float32).reshape(-1, 4) / 400)
data = run.data(samples, epochs=1)

for step in run.steps(data, elastic.State(model=model, optimizer=optimizer)):
    number = step.number
    wait_at_gate(GATES, number, run.rank)
    hold("c-code", number)
    step.mean_loss(lambda batch: model(batch.data[0]).pow(2).mean())
    optimizer.step()

    def evaluated(batch: elastic.Batch, number: int = number) -> torch.Tensor:
        hold("evaluation", number)
        return model(batch.data[0]).sum()

    run.evaluate(samples, evaluated)
wait_at_gate(GATES, "after the last step", run.rank)
