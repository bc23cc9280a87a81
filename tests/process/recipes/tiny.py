"""A small recipe with all the state that is easily lost in a resume.

It has BatchNorm, Dropout, momentum, a schedule and an EMA copy. The optimizer is its own: torch's
import a compiler, which takes seconds at every start.

Environment variables carry what a test asks for; they are no part of a run's identity:

TINY_GATES      Folder. While it holds the file `gate-<n>`, each rank makes the file
                `at-<n>-rank<r>` before step n and waits for the file `go-<n>`. n is also
                `meet-<g>`: in generation g, before the ranks agree on a state to restore; and
                `load-<g>`: while they load it. Where it holds `starve-rank<r>`, this rank removes
                that file and takes all memory that it can get.
TINY_RAISE      "STEP RANK": this rank raises in this step, every time.
TINY_PRINT      So many KiB are printed in each step.
TINY_SAMPLES    Folder. Each rank writes there which samples each of its shards of a step has,
                before it uses them, with its node and the time by its wall clock.
TINY_EVALUATE   Any text: the body ends each epoch with an evaluation, which waits at the gate of
                its step, `evaluation-<n>`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic
from elastic.config import environment

GATE_S = 250.0
NOTED: set[tuple[int, int]] = set()


def wait_at_gate(folder: Path, number: int | str, rank: int) -> None:
    if not (folder / f"gate-{number}").exists():
        return
    (folder / f"at-{number}-rank{rank}").touch()
    deadline = time.monotonic() + GATE_S
    while not (folder / f"go-{number}").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"gate {number} stayed shut for {GATE_S:.0f} s")
        time.sleep(0.01)


def starve_if_asked(folder: Path, rank: int) -> None:
    asked = folder / f"starve-rank{rank}"
    if asked.exists():
        asked.unlink()
        taken = []
        while True:
            taken.append(b"x" * 2**24)


def note_samples(batch: elastic.Batch, step: int, rank: int) -> None:
    folder = os.environ.get("TINY_SAMPLES")
    if folder is not None and (step, batch.shard) not in NOTED:
        NOTED.add((step, batch.shard))  # a sharded run may compute a shard twice
        generation, agent = generation_now(), environment.read_assignment().agent
        record = {"generation": generation, "step": step, "epoch": batch.epoch, "shard": batch.shard}
        record |= {"node": "" if agent is None else agent.node, "time": time.time()}
        line = json.dumps(record | {"samples": batch.indices.tolist()}) + "\n"
        with Path(folder, f"{generation}-rank{rank}.jsonl").open("a") as file:
            file.write(line)


def generation_now() -> int:
    agent = environment.read_assignment().agent
    return 0 if agent is None else agent.generation


def evaluate_if_asked(run: elastic.Run, step: elastic.Step, gates: Path) -> None:
    def held(_: elastic.Batch) -> float:
        wait_at_gate(gates, f"evaluation-{step.number}", run.rank)
        return 1.0

    if step.ends_epoch and "TINY_EVALUATE" in os.environ:
        run.evaluate([0.0], held)


def do_what_is_asked(gates: Path, number: int, rank: int) -> None:
    wait_at_gate(gates, number, rank)
    starve_if_asked(gates, rank)
    print(("." * 1023 + "\n") * int(os.environ.get("TINY_PRINT", "0")), end="")
    if os.environ.get("TINY_RAISE") == f"{number} {rank}":
        raise RuntimeError(f"the recipe's own mistake on rank {rank}")


class Momentum:
    """SGD with momentum and a rate that falls with its own count of steps."""

    def __init__(self, parameters: list[nn.Parameter], before_load: Callable[[], None]) -> None:
        self.before_load = before_load
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
        self.before_load()
        self.momenta, self.steps = state["momenta"], state["steps"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--sharded", action="store_true")
    settings = parser.parse_args()
    run = elastic.start(seed=7, global_batch=settings.global_batch, shards=settings.shards)

    gates = Path(os.environ.get("TINY_GATES", "no gates"))
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(260, 16, generator=draw)
    labels = torch.randint(8, (260,), generator=draw)
    # Large enough that a checkpoint of it does not fit where a test leaves little room.
    model = nn.Sequential(
        nn.Linear(16, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 96), nn.Linear(96, 8)
    )
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if settings.sharded:
        for each in (model, ema.module):
            run.fully_shard(each[4])
            run.fully_shard(each)
    optimizer = Momentum(
        list(model.parameters()), lambda: wait_at_gate(gates, f"load-{generation_now()}", run.rank)
    )
    data = run.data(TensorDataset(inputs, labels), epochs=3, tail="drop")
    state = elastic.State(model=model, ema=ema, optimizer=optimizer)

    wait_at_gate(gates, f"meet-{generation_now()}", run.rank)
    for step in run.steps(data, state):
        do_what_is_asked(gates, step.number, run.rank)

        def loss(batch: elastic.Batch, number: int = step.number) -> Tensor:
            note_samples(batch, number, run.rank)
            return nn.functional.cross_entropy(model(batch.data[0]), batch.data[1])

        step.mean_loss(loss)
        optimizer.step()
        ema.update_parameters(model)
        step.log(lr=optimizer.rate)
        evaluate_if_asked(run, step, gates)
    run.print("tiny is done")


if __name__ == "__main__":
    main()
