"""Counts what each step calls, and how often it waits for the device.

The same step in plain PyTorch, with micro-batches, is counted afterwards. A file of JSON has both.
Counts of the first steps, which look at more, are left out.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic

SAMPLES, STEPS, FIRST = 4, 180, 140
# Of a tensor on a device, each of these makes the host wait.
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")


class Counter:
    """calls: of functions of Python. reads: of numbers of tensors."""

    def __init__(self) -> None:
        self.calls = self.reads = 0
        self.of_steps: list[tuple[int, int]] = []

    def step(self) -> None:
        self.of_steps.append((self.calls, self.reads))
        self.calls = self.reads = 0

    def on_event(self, _frame: Any, event: str, _argument: Any) -> None:
        self.calls += event == "call"

    @contextmanager
    def counting(self) -> Iterator[None]:
        for name in READS:
            setattr(Tensor, name, self._counted(getattr(Tensor, name)))
        sys.setprofile(self.on_event)
        yield
        sys.setprofile(None)

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.reads += 1
            self.calls -= 1  # this one
            return read(*arguments, **options)

        return counted

    def medians(self) -> dict[str, float]:
        calls, reads = zip(*self.of_steps[FIRST:], strict=True)
        return {"calls": statistics.median(calls), "reads": statistics.median(reads)}


def main() -> None:
    settings = json.loads(sys.argv[1])
    shards, layers = settings["shards"], settings.get("layers", 7)
    run = elastic.start(seed=0, global_batch=SAMPLES * shards, shards=shards)
    norms = [nn.BatchNorm1d(8)] if settings.get("sum") else []
    model = nn.Sequential(*norms, *(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(STEPS * SAMPLES * shards, 8, generator=torch.Generator().manual_seed(0))
    data, state = run.data(TensorDataset(inputs), epochs=1), elastic.State(model=model, optimizer=optimizer)

    def loss_of(values: Tensor) -> Tensor:
        output: Tensor = model(values)
        return output.square().mean()

    ours, plain = Counter(), Counter()
    with ours.counting():
        for step in run.steps(data, state):
            ours.step()
            if settings.get("sum"):
                step.backward(step.sum(lambda batch: loss_of(batch.data[0]).reshape(1)).sum())
            else:
                step.mean_loss(lambda batch: loss_of(batch.data[0]))
            optimizer.step()

    with plain.counting():
        for each in inputs.chunk(STEPS):
            plain.step()
            optimizer.zero_grad()
            for part in each.chunk(shards):
                (loss_of(part) / shards).backward()
            optimizer.step()
    Path(settings["out"]).write_text(json.dumps({"ours": ours.medians(), "plain": plain.medians()}))


if __name__ == "__main__":
    main()
