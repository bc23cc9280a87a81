"""A recipe that chooses its samples, and lets an evaluation decide what becomes of its state.

Its argument: `weights` (drawn with replacement) or `order` (a curriculum whose epochs grow and draw
random numbers). A held-out part is evaluated in each epoch, with the model left in training mode;
ReduceLROnPlateau reads its loss, the best weights are kept, and with `order` the run stops early.

Environment variables, besides TINY_GATES of tiny.py; a file of settings could say the same:

CHOOSING    "STEPS SAMPLES"
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from tiny import wait_at_gate
from torch import nn
from torch.utils.data import TensorDataset

import elastic

PATIENCE = 2  # epochs


class Descent(torch.optim.Optimizer):
    """Plain SGD without the methods of torch's own that import a compiler, which takes seconds."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self.lr = lr
        super().__init__(parameters, {})

    def add_param_group(self, param_group: dict) -> None:
        self.param_groups.append({"params": list(param_group["params"]), "lr": self.lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)

    def state_dict(self) -> dict:
        return {"lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict) -> None:
        self.param_groups[0]["lr"] = state["lr"]


def main() -> None:
    choice = sys.argv[1]
    steps, samples = map(int, os.environ.get("CHOOSING", "14 70").split())
    gates = Path(os.environ.get("TINY_GATES", "no gates"))
    run = elastic.start(seed=5, global_batch=16, shards=4)
    draw = torch.Generator().manual_seed(2)
    inputs, labels = torch.randn(samples, 8, generator=draw), torch.randint(3, (samples,), generator=draw)
    held_out = TensorDataset(inputs[:27], labels[:27])

    def curriculum(epoch: int) -> np.ndarray:
        return np.random.permutation(samples)[: 20 + 13 * (epoch % 3)]  # noqa: NPY002

    chosen = {"weights": torch.arange(samples)} if choice == "weights" else {"order": curriculum}
    data = run.data(TensorDataset(inputs, labels), steps=steps, tail="pad", **chosen)
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 3))
    best = nn.Linear(12, 3)
    values = elastic.Values(best=1e9, worse=0)
    optimizer = Descent(list(model.parameters()), lr=2.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def loss_of(batch: elastic.Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch.data[0]), batch.data[1], reduction="sum")

    state = elastic.State(model=model, best=best, values=values, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(data, state):
        wait_at_gate(gates, step.number, run.rank)
        step.mean_loss(lambda batch: loss_of(batch) / len(batch.indices))
        optimizer.step()
        if step.ends_epoch:
            loss = run.evaluate(held_out, loss_of) / len(held_out)
            scheduler.step(loss)
            if loss < values.best:
                values.best = loss
                best.load_state_dict(model[-1].state_dict())
            step.log(held_out=loss, rate=optimizer.param_groups[0]["lr"])
            values.worse = 0 if loss == values.best else values.worse + 1
            if choice == "order" and values.worse == PATIENCE:
                break
    run.print("at the end", run.evaluate(held_out, loss_of).hex())


if __name__ == "__main__":
    main()
