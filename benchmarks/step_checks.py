"""What a step's checks cost: of a ResNet-50 (151 modules, 161 parameters, 159 buffers), 8 shards.

python benchmarks/steady.py --checks

Without forward and backward, at a world size of one, where one rank makes the calls of all shards.
A step of 50 ms is the short one to which the shares refer. What each step does alike is the median
of many rounds. Seconds are those of the processor, so that other load counts little.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torchvision
from rich.table import Table
from torch.utils.data import TensorDataset

from elastic.data.loader import Batch
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.train import refuse
from elastic.train.state.state import State
from elastic.train.step.buffers import Buffers
from elastic.train.step.contract import Contract, Modes, compute_again

SHARDS, ROUNDS, STEP_S = 8, 200, 0.050
STEPS = 1000


def median_s(function: Callable[[], object], *before: Callable[[], object]) -> float:
    """before: called before each call, and not measured."""
    seconds = []
    for _ in range(ROUNDS):
        for each in before:
            each()
        began = time.thread_time()
        function()
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The objects of an ordinary recipe, after an update."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: State
    dataset: TensorDataset


def recipe() -> Recipe:
    torch.set_num_threads(1)
    model = torchvision.models.resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    schedule.step()
    state = State(model=model, optimizer=optimizer, schedule=schedule)
    dataset = TensorDataset(torch.zeros(100, 3, 4, 4), torch.zeros(100))
    return Recipe(model=model, optimizer=optimizer, state=state, dataset=dataset)


def of_each_step_s(of: Recipe) -> dict[str, float]:
    """Seconds a step, by what they are spent on."""
    contract = Contract(of.state)
    exchange = Exchange(shards=SHARDS, world_size=1, rank=0, group=None)
    gradients = Gradients(contract, exchange)
    grads = {p: p.grad for p in of.model.parameters()}
    numbers, output = iter(range(1, 10**9)), torch.zeros(())
    none = torch.zeros(0)
    batch = Batch(data=none, indices=none, streams=none, epoch=0, shard=0, seed=0)

    def forward() -> None:
        contract.begin_pass()
        for _ in range(SHARDS):
            contract.call(lambda _batch: output, batch)
        contract.end_pass()

    def begin() -> None:
        contract.begin_step(next(numbers), lambda _optimizer: None)
        contract.begin_computation(None)
        layout = gradients._layout = gradients._current_layout([])  # noqa: SLF001
        gradients._hooks.attach(layout.parameters)  # noqa: SLF001
        gradients._hooks.check()  # noqa: SLF001 - as after the last backward

    def computed() -> None:
        for parameter, grad in grads.items():
            parameter.grad = grad

    def end() -> None:
        contract.end_computation()
        contract._before(of.optimizer)  # noqa: SLF001 - as torch calls it before an update
        contract._updated(of.optimizer)  # noqa: SLF001 - and after it
        contract.end_step()

    def shards_in_modes() -> None:
        modes = Modes.of(contract.parts.modules)
        for _ in range(SHARDS):
            modes.load()

    contract.begin_step(next(numbers), lambda _optimizer: None)
    # The contents of parameters are compared in the first step alone.
    begin_s = median_s(begin, forward, computed, end)
    end_s = median_s(end, begin, forward, computed)
    found = {
        "parameters that are trained, gradients that are unused": begin_s + end_s,
        "forwards that change parameters": median_s(forward),
        "modes of each shard": median_s(shards_in_modes),
        "weights that hooks compute": median_s(lambda: compute_again(contract.parts.modules)),
        "signals that the recipe handles itself": median_s(refuse.own_signal_handlers),
    }
    contract.close()
    gradients.close()
    return found


def of_buffers_s(of: Recipe) -> dict[str, float]:
    """Seconds a step, by what they are spent on."""
    buffers = Buffers(of.state, SHARDS, torch.device("cpu"))
    buffers.begin()
    contents = buffers.save()
    sums = buffers.sums
    integers = torch.cat([contents.values[i].reshape(-1).long() for i in sums.integers])
    of_shards = integers.repeat(SHARDS, 1)
    total = buffers.contributions({0: contents})[0]

    def integers_agree() -> None:
        sums._hashes(of_shards)  # noqa: SLF001 - a part alone is measured
        sums.have_same_integers(sums.signs(total).tolist())

    return {
        "integers that differ between shards": median_s(integers_agree),
    }


def of_copies_s(of: Recipe) -> float:
    """Seconds a step in which each shard gets the buffers that the step began with."""
    buffers, modules = Buffers(of.state, SHARDS, torch.device("cpu")), of.state.submodules()

    def copy() -> None:
        buffers.begin(modules)
        for _ in range(SHARDS):
            buffers.load()
            buffers.save()

    return median_s(copy)


def checks() -> Table:
    of = recipe()
    found = of_each_step_s(of) | of_buffers_s(of)
    table = Table("checked in every step", "µs", "share of 50 ms", title="ResNet-50, 8 shards on one rank")
    sums = {
        "together": sum(found.values()),
        "copies of buffers for each shard, beside these": of_copies_s(of),
    }
    for name, seconds in (found | sums).items():
        table.add_row(name, f"{seconds * 1e6:.0f}", f"{seconds / STEP_S:.2%}")
    return table
