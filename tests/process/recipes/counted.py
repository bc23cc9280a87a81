"""Counts what each step calls, and how often it waits for the device.

Odd steps have a mean loss, and even ones a sum. The same step in plain PyTorch, with micro-batches,
is counted afterwards. Arguments: the file that gets both as JSON; the shards; any third one gives
the model buffers.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic

SHARDS, SAMPLES, LAYERS, STEPS = int(sys.argv[2]), 4, 7, 36
# Of a tensor on a device, each of these makes the host wait.
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")

counts = {"calls": 0, "reads": 0}  # calls: of functions of Python. reads: of numbers of tensors.


def on_event(_frame: Any, event: str, _argument: Any) -> None:
    counts["calls"] += event == "call"


def counted(read: Callable[..., Any]) -> Callable[..., Any]:
    def count_and_read(*arguments: Any, **options: Any) -> Any:
        counts["reads"] += 1
        counts["calls"] -= 1  # this one
        return read(*arguments, **options)

    return count_and_read


def of_last_step() -> dict[str, int]:
    found = dict(counts)
    counts.update(calls=0, reads=0)
    return found


run = elastic.start(seed=0, global_batch=SAMPLES * SHARDS, shards=SHARDS)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
if sys.argv[3:]:
    model.append(nn.BatchNorm1d(8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(STEPS * SAMPLES * SHARDS, 8, generator=torch.Generator().manual_seed(0))
data, state = run.data(TensorDataset(inputs), epochs=1), elastic.State(model=model, optimizer=optimizer)


def loss_of(values: Tensor) -> Tensor:
    output: Tensor = model(values)
    return output.square().mean()


ours, plain = [], []
for name in READS:
    setattr(Tensor, name, counted(getattr(Tensor, name)))
sys.setprofile(on_event)
for step in run.steps(data, state):
    ours.append(of_last_step())
    if step.number % 2:
        step.mean_loss(lambda batch: loss_of(batch.data[0]))
    else:
        step.backward(step.sum(lambda batch: loss_of(batch.data[0]).reshape(1)).sum())
    optimizer.step()
for each in inputs.chunk(STEPS):
    plain.append(of_last_step())
    optimizer.zero_grad()
    for part in each.chunk(SHARDS):
        (loss_of(part) / SHARDS).backward()
    optimizer.step()
sys.setprofile(None)
Path(sys.argv[1]).write_text(json.dumps([ours, plain]))
