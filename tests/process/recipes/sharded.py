"""A small sharded recipe: clipping, dropout, checkpointed activations, an evaluation, two passes.

--replicated trains without run.fully_shard; three workers shard fewer modules. --fault: a mistake
that must be found, or refused.
TINY_GATES: as in tiny.py.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import wait_at_gate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import elastic


class Block(nn.Module):
    """Its sizes are no multiples of the number of workers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 37), nn.Linear(37, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = checkpoint(lambda y: self.down(self.up(y).relu()), x, use_reentrant=False)
        out: Tensor = x + nn.functional.dropout(self.norm(mixed), 0.1, self.training)
        return out


class Net(nn.Sequential):
    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for number in order:
            x = self[number](x)
        return x


class Forgetful(torch.autograd.Function):
    """Its gradient depends on how often this process has asked for it."""

    count = 0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        Forgetful.count += 1
        return gradient * (1 + Forgetful.count * 1e-3)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicated", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("--leave", type=int, default=0)
    return parser.parse_args()


def built(run: elastic.Run, asked: argparse.Namespace) -> Net:
    model = Net(nn.Linear(19, 13), Block(13), Block(13), nn.Linear(13, 5))
    if asked.fault == "unused":
        model[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
    if not asked.replicated:
        shard = fully_shard if asked.fault == "torch" else run.fully_shard
        for block in model[1:3]:
            shard(block)
        shard(model)
    nn.init.normal_(model[0].weight, std=0.1)  # of rows, as of the whole tensor
    if asked.fault == "settings":
        model.set_gradient_divide_factor(2.0)
    if asked.fault == "hook":
        model[0].weight.register_hook(torch.zeros_like)
    alone(run, model, asked.fault == "alone first", lambda net: net(torch.zeros(2, 19)))
    return model


def layers(fault: str, shard: int) -> tuple[int, ...]:
    if fault == ("some first" if shard < 2 else "some last"):
        return 0, 1, 3
    return (0, 2, 1, 3) if fault == "order" and shard % 2 else (0, 1, 2, 3)


def alone(run: elastic.Run, model: Net, is_wanted: bool, gather: Callable[[Net], Any]) -> None:
    if is_wanted and run.is_first:
        gather(model)


def clipped(model: Net, fault: str) -> Tensor:
    acts = {"sum": lambda g: g.sub_(g.sum()), "row": lambda g: g[0], "data": lambda g: setattr(g, "data", g)}
    acts.get(fault, lambda g: g.isfinite().all())(model[1].up.weight.grad)
    clip = torch.nn.utils.clip_grad_norm_ if fault == "clip" else elastic.clip_grad_norm_
    return clip(model.parameters(), 0.5)


@torch.no_grad()
def keep_average(kept: elastic.Values, model: nn.Module, run: elastic.Run) -> list[Tensor]:
    """After a forward, which leaves parameters that may be written to. Returns them on one rank."""
    model(torch.zeros(2, 19))
    (w := model[0].weight).add_(torch.empty_like(w).exponential_(), alpha=-1e-3 * float(w.abs().max()))
    now = [p.detach().clone() for p in model.parameters()]
    kept.average = [old.lerp(new, 0.1) for old, new in zip(kept.average or now, now, strict=True)]
    return now if run.is_first else []


def main() -> None:
    asked = arguments()
    run = elastic.start(seed=3, global_batch=16, shards=4)
    samples = TensorDataset(torch.randn(160, 19), torch.randint(5, (160,)))
    model = built(run, asked)
    teacher, spare = (nn.Linear(19, 13).requires_grad_(False) for _ in range(2))
    for module in () if asked.replicated else (teacher, spare)[: 1 if run.world_size == 3 else 2]:
        run.fully_shard(module)
    kind = torch.optim.Adafactor if asked.fault == "optimizer" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    kept = elastic.Values(average=None)  # of the parameters, from the first step on
    state = elastic.State(model=model, optimizer=optimizer, kept=kept, teacher=teacher, spare=spare)

    def loss(batch: elastic.Batch) -> Tensor:
        x, y = batch.data
        scores = model(x, layers(asked.fault, batch.shard))
        if asked.fault == "memory":
            scores = Forgetful.apply(scores)
        found = nn.functional.cross_entropy(scores, y) + teacher(x).mean()
        if asked.fault == "penalty":
            found = found + 1e-3 * sum(p.full_tensor().square().sum() for p in model[1].parameters())
        return found

    def right(batch: elastic.Batch) -> Tensor:
        return (model(batch.data[0]).argmax(1) == batch.data[1]).sum()

    def moments(batch: elastic.Batch) -> Tensor:
        scores = model(batch.data[0]).double()
        return torch.stack([scores.sum(0), scores.square().sum(0)])

    for step in run.steps(run.data(samples, epochs=2), state):
        wait_at_gate(Path(os.environ.get("TINY_GATES", "no gates")), step.number, run.rank)
        if step.number == -asked.leave:
            break
        if asked.sums:
            mean, square = step.sum(moments) / step.global_batch
            step.backward((square - mean.square() - 1).square().sum())
        else:
            step.mean_loss(loss)
        teacher.weight.mul_(0.9).add_(model[0].weight.detach(), alpha=0.1)  # after a forward alone
        alone(run, model, asked.fault == "alone in it", lambda net: net(torch.zeros(2, 19)))
        step.log(norm=clipped(model, asked.fault))
        optimizer.step()
        _now = keep_average(kept, model, run)  # a rehearsal finds it
        if step.ends_epoch:
            step.log(right=run.evaluate(samples, right, batch_size=50))
        if step.number == asked.leave:
            break
    run.evaluate(samples, lambda batch: model(batch.data[0]).sum(), batch_size=50)
    alone(run, model, asked.fault == "alone last", lambda net: net[0].weight.full_tensor())


main()
