"""What a slow rank costs with `--balance auto` and with `off`, beside the best split.

python benchmarks/unequal.py [--turns 3] [--steps 120] [--cases slow busy]

Two workers with 8 shards. Two cases, in which `off` and `auto` take turns; the figure of a turn is
the median of the last half of its steps, in which `auto` has long moved the shards.

slow: each shard sleeps 20 ms, and one rank is three times slower by `--faults`. The best split is
6 and 2 shards, which no step can do in less than 120 ms.
busy: each shard multiplies matrices, each worker is pinned to a core, and one of the two cores is
shared with a process that wants two thirds of it (all of these, where this runs under `chrt -f`,
which keeps other load of the machine away). The best split is not known; `alone` is a turn without
that process, by `off`.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
SHARD_S, SIZE = 0.02, 512
BEST_S = 6 * SHARD_S
SLOW = ("--faults", "step 1 rank 1: slow 3x")
BUSY = """
import os, time
os.sched_setaffinity(0, {1})
if os.sched_getscheduler(0) == os.SCHED_FIFO:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_getparam(0).sched_priority + 1))
while True:
    until = time.monotonic() + 0.010
    while time.monotonic() < until:
        pass
    time.sleep(0.005)
"""


def turn(
    how: str, steps: int, options: tuple[str, ...], words: tuple[object, ...]
) -> tuple[float, list[int]]:
    """The median step in seconds, and the shards of each rank at the end, if some were moved."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [
            BIN / "elastic-train",
            HERE / "unequal_recipe.py",
            "--rehearse",
            "off",
            "--run-dir",
            run,
            "--balance",
            how,
        ]
        command += [
            "--nproc-per-node",
            2,
            "--audit",
            "off",
            "--save-every",
            "1h",
            *options,
            "--",
            steps,
            *words,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode:
            sys.exit(f"{command[0]} failed:\n{done.stdout}\n{done.stderr}")
        lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
        report = subprocess.run(
            [str(BIN / "elastic-train"), "report", str(run), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
    times = [line["time"] for line in lines[len(lines) // 2 :]]
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    return seconds, json.loads(report.stdout)["shards_by_rank"]


@contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--cases", nargs="+", choices=("slow", "busy"), default=("slow", "busy"))
    args = parser.parse_args()
    table = Table(
        "case", "turn", "off, s/step", "auto, s/step", "beside it", "off / auto", "shards of the ranks"
    )
    for number in range(1, args.turns + 1):
        if "slow" in args.cases:
            found = {how: turn(how, args.steps, SLOW, (SHARD_S, 64)) for how in ("off", "auto")}
            add(table, "slow", number, found, f"best {BEST_S:.3f}, factor {found['auto'][0] / BEST_S:.2f}")
        if "busy" in args.cases:
            pinned = 0.0, SIZE, "pinned"
            alone = turn("off", args.steps, (), pinned)[0]
            with busy_core():
                found = {how: turn(how, args.steps, (), pinned) for how in ("off", "auto")}
            add(table, "busy", number, found, f"alone {alone:.3f}")
    Console(width=140).print(table)


def add(table: Table, case: str, number: int, found: dict[str, tuple[float, list[int]]], beside: str) -> None:
    off, auto = found["off"][0], found["auto"][0]
    shards = ", ".join(map(str, found["auto"][1])) or "not moved"
    table.add_row(case, str(number), f"{off:.3f}", f"{auto:.3f}", beside, f"{off / auto:.2f}", shards)


if __name__ == "__main__":
    main()
