"""A recipe in miniature with everything whose state is easily lost: BatchNorm, Dropout, momentum, a schedule, an EMA copy.

With `--form sum` it has torch's own AdamW and scheduler; else an optimizer of its own, because torch's import a compiler, for seconds at every start.

What a test wants of it comes by environment variables, which are no part of a run's identity:

TINY_GATES      folder; before step n, while it holds the file `gate-<n>`, each rank tells `at-<n>-rank<r>` and waits for the file `go-<n>`
TINY_RAISE      "STEP RANK": this rank raises in this step, every time
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic

GATE_S = 250.0


def wait_at_gate(folder: Path, number: int, rank: int) -> None:
    if not (folder / f"gate-{number}").exists():
        return
    (folder / f"at-{number}-rank{rank}").touch()
    deadline = time.monotonic() + GATE_S
    while not (folder / f"go-{number}").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"gate {number} stayed shut for {GATE_S:.0f} s")
        time.sleep(0.01)


def raise_if_asked(number: int, rank: int) -> None:
    if os.environ.get("TINY_RAISE") == f"{number} {rank}":
        raise RuntimeError(f"the recipe's own mistake on rank {rank}")


class Momentum:
    """SGD with momentum and a rate that falls with its own count of steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.momenta = [torch.zeros_like(p) for p in parameters]
        self.steps = 0

    @property
    def rate(self) -> float:
        return 0.05 / (1 + self.steps)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(self.rate * momentum)
        self.steps += 1

    def state_dict(self) -> dict:
        return {"momenta": self.momenta, "steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        self.momenta, self.steps = state["momenta"], state["steps"]


class AdamWithSchedule:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=24)

    @property
    def rate(self) -> float:
        return self.scheduler.get_last_lr()[0]

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


def moments(outputs: Tensor) -> Tensor:
    """[n, D] → float64 [D + D * D]: what a loss over the whole batch needs of one shard."""
    wide = outputs.double()
    return torch.cat([wide.sum(0), (wide.T @ wide).flatten()])


def whitening_loss(total: Tensor, count: int, dim: int) -> Tensor:
    mean, second = total[:dim] / count, total[dim:].view(dim, dim) / count
    return (second - torch.outer(mean, mean) - torch.eye(dim)).pow(2).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--form", choices=["mean", "sum"], default="mean")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--shards", type=int, default=4)
    settings = parser.parse_args()
    run = elastic.start(seed=7, global_batch=settings.global_batch, shards=settings.shards)

    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(260, 16, generator=draw)
    labels = torch.randint(8, (260,), generator=draw)
    # Large enough that a checkpoint of it does not fit where a test leaves little room.
    model = nn.Sequential(
        nn.Linear(16, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 96), nn.Linear(96, 8)
    )
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if settings.form == "sum":
        optimizer = AdamWithSchedule(list(model.parameters()))
        updates = {"optimizer": optimizer.optimizer, "scheduler": optimizer.scheduler}
    else:
        optimizer = Momentum(list(model.parameters()))
        updates = {"optimizer": optimizer}
    data = run.data(TensorDataset(inputs, labels), epochs=3, tail="drop")
    state = elastic.State(model=model, ema=ema, **updates)

    gates = Path(os.environ.get("TINY_GATES", "no gates"))
    for step in run.steps(data, state):
        wait_at_gate(gates, step.number, run.rank)
        raise_if_asked(step.number, run.rank)
        if settings.form == "mean":
            step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
        else:
            total = step.sum(lambda batch: moments(model(batch.data[0])))
            step.backward(whitening_loss(total, step.global_batch, 8))
        optimizer.step()
        ema.update_parameters(model)
        step.log(lr=optimizer.rate)
    run.print("tiny is done")


if __name__ == "__main__":
    main()
