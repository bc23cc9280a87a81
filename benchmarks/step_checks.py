"""What a step's checks cost: of a ResNet-50 (151 modules, 161 parameters, 159 buffers), 8 shards.

python benchmarks/steady.py --checks

Medians over many rounds in one process, without forward and backward, at a world size of one, where
one rank makes the calls of all shards. A step of 50 ms is the short one to which the shares refer.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from rich.table import Table

from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.train.buffers import Buffers
from elastic.train.contract import Contract
from elastic.train.state import State

SHARDS, ROUNDS, STEP_S = 8, 200, 0.050


def median_s(function: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def costs_s() -> dict[str, float]:
    """Seconds a step, by what they are spent on."""
    torch.set_num_threads(1)
    model = torchvision.models.resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    state = State(model=model, optimizer=optimizer)
    contract = Contract(state, global_batch=SHARDS, shards=SHARDS)
    exchange = Exchange(shards=SHARDS, world_size=1, rank=0, group=None)
    gradients, buffers = Gradients(contract, exchange), Buffers(state, SHARDS, torch.device("cpu"))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    numbers = iter(range(1, 10**9))
    buffers.begin()
    contents = buffers.save()
    integers = [contents.values[i].reshape(-1).long() for i in buffers._ints]  # noqa: SLF001 - a part alone is measured
    joined, total = torch.cat(integers), buffers.contribution(contents, 0)

    def forward() -> None:
        with contract.forward():
            for _ in range(SHARDS):
                with contract.function():
                    pass

    def computation() -> None:
        contract.begin_computation(None)
        gradients._current_layout()  # noqa: SLF001
        contract.end_computation(parameters, [1.0])
        contract._updated(optimizer)  # noqa: SLF001 - as torch calls it after an update

    def integers_agree() -> None:
        for _ in range(SHARDS):
            buffers._hash(joined)  # noqa: SLF001
        buffers.have_same_integers(total)

    contract.begin_step(next(numbers), lambda: None)
    # The contents of parameters are compared in the first step alone.
    contract.begin_step(next(numbers), lambda: None)
    found = {
        "parameters that are trained, gradients that are unused": median_s(computation),
        "forwards that change parameters": median_s(forward),
        "places of buffers": max(0.0, median_s(buffers.begin) - median_s(buffers.save)),
        "integers that differ between shards": median_s(integers_agree),
    }
    contract.close()
    gradients.close()
    return found


def checks() -> Table:
    table = Table("checked in every step", "µs", "share of 50 ms", title="ResNet-50, 8 shards on one rank")
    found = costs_s()
    for name, seconds in (found | {"together": sum(found.values())}).items():
        table.add_row(name, f"{seconds * 1e6:.0f}", f"{seconds / STEP_S:.2%}")
    return table
