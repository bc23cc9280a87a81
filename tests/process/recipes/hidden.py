"""A recipe whose loss depends on how often its loop ran, as something outside its State counts it.

Its argument says what counts: `attribute` of a class, reached through an object; `environment`; or
`values`, which the State saves. Beside that it is exact, whatever dies.

Environment variables, besides TINY_GATES of tiny.py:

HIDDEN_SETTING      A number that it reads once, as it would read a file of settings.
HIDDEN_LENGTH       The number of steps. The rate falls with the fraction that is done.
"""

import os
import sys
from pathlib import Path

import torch
from tiny import wait_at_gate
from torch import nn
from torch.utils.data import TensorDataset

import elastic


class Strength:
    steps = 0

    def next(self) -> int:
        type(self).steps += 1
        return self.steps


class Variable:
    def next(self) -> int:
        os.environ["HIDDEN_STEPS"] = str(int(os.environ.get("HIDDEN_STEPS", "0")) + 1)
        return int(os.environ["HIDDEN_STEPS"])


class Saved:
    def __init__(self, values: elastic.Values) -> None:
        self.values = values

    def next(self) -> int:
        self.values.steps += 1
        return self.values.steps


def main() -> None:
    kind, gates = sys.argv[1], Path(os.environ.get("TINY_GATES", "no gates"))
    run = elastic.start(seed=3, global_batch=12, shards=6)
    inputs = torch.randn(36, 4, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    values = elastic.Values(steps=0)
    setting = float(os.environ.get("HIDDEN_SETTING", "1"))
    count = {
        "attribute": Strength,
        "environment": Variable,
        "values": lambda: Saved(values),
    }[kind]()
    data = run.data(TensorDataset(inputs), steps=int(os.environ.get("HIDDEN_LENGTH", "18")))
    for step in run.steps(data, elastic.State(model=model, values=values)):
        wait_at_gate(gates, step.number, run.rank)
        share = setting * count.next()
        step.mean_loss(lambda batch, share=share: (model(batch.data[0]) - 0.01 * share).square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.05 * (1 - step.fraction) * parameter.grad)


if __name__ == "__main__":
    main()
