"""Seconds per step of elastic-train and of plain DistributedDataParallel under torchrun.

python benchmarks/steady.py [--world 2] [--steps 40] [--repeats 5] [--save-every 100000steps]

Both train the same model with the same world size and samples a rank. They take turns, so that
other load on the machine hits both. The figure of a turn is its median step; the table shows the
medians over all turns, and the median of the ratios of the turns. Two cases: shards = world size;
and shards = four times the world size, beside DDP with gradient accumulation over four
micro-batches.

python benchmarks/steady.py --audit auto|Nsteps [--steps 400]

The same model alone. Audited steps are compared with the others of the same run, so that other load
hits both: the table shows the medians, and which share of the run's time the audits cost. With
`auto` the first audit, in the second step, is not in it; later ones are some two hundred steps
apart, so that fewer than 400 steps say nothing. On two quiet cores those take two and a half
minutes, of both cases together; `--world 1 --samples 2` has fewer and shorter steps.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from step_checks import checks

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
WARM_UP = 5


def median_step_s(times: list[float]) -> float:
    """times: when each step ended. The first steps are left out: they allocate and connect."""
    steps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(steps[WARM_UP:])


def ours(args: argparse.Namespace, shards: int, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The lines of the metrics."""
    command = [
        BIN / "elastic-train",
        HERE / "resnet_ours.py",
        "--run-dir",
        folder / "run",
        "--nproc-per-node",
        args.world,
    ]
    command += ["--save-every", args.save_every, *options, "--", shards, args.samples, args.steps]
    run(command)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def times(lines: list[dict[str, Any]]) -> list[float]:
    return [line["time"] for line in lines]


def theirs(args: argparse.Namespace, shards: int, folder: Path) -> float:
    written = folder / "times.json"
    command = [BIN / "torchrun", "--standalone", f"--nproc-per-node={args.world}", HERE / "resnet_ddp.py"]
    run([*command, shards // args.world, args.samples, args.steps, written])
    return median_step_s(json.loads(written.read_text()))


def run(command: list[object]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stdout}\n{done.stderr}")


def audits(args: argparse.Namespace) -> Table:
    columns = ("shards", "s/step", "s/audited step", "audited steps", "share of the time")
    table = Table(*columns, title=f"--audit {args.audit}, {args.samples} samples a shard, world {args.world}")
    for shards in (args.world, 4 * args.world):
        with tempfile.TemporaryDirectory() as folder:
            lines = ours(args, shards, Path(folder), "--audit", args.audit)[WARM_UP:]
        audited = [line["seconds"] for line in lines if "audited" in line]
        others = [line["seconds"] for line in lines if "audited" not in line]
        step_s = statistics.median(others)
        share = sum(seconds - step_s for seconds in audited) / (sum(audited) + sum(others))
        audited_s = f"{statistics.median(audited):.4f}" if audited else "-"
        table.add_row(
            str(shards), f"{step_s:.4f}", audited_s, f"{len(audited)} of {len(lines)}", f"{share:.2%}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="samples a shard")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--save-every", default="100000steps", help="of our runs; the last state is saved in any case"
    )
    parser.add_argument("--audit", help="measure audits instead: auto or Nsteps")
    parser.add_argument("--checks", action="store_true", help="measure the checks of a step alone")
    args = parser.parse_args()
    if args.checks:
        Console().print(checks())
        return
    if args.audit is not None:
        Console().print(audits(args))
        return
    table = Table(
        "shards",
        "ours s/step",
        "DDP s/step",
        "ratio",
        "ratios of the turns",
        title=f"ResNet-18 32x32, {args.samples} samples a shard, world {args.world}",
    )
    for shards in (args.world, 4 * args.world):
        turns = []
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory() as folder:
                own = median_step_s(times(ours(args, shards, Path(folder))))
                turns.append((own, theirs(args, shards, Path(folder))))
        ratios = [a / b for a, b in turns]
        a, b = (statistics.median(side) for side in zip(*turns, strict=True))
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(str(shards), f"{a:.3f}", f"{b:.3f}", f"{statistics.median(ratios):.2f}", each)
    Console().print(table)
    Console().print(checks())


if __name__ == "__main__":
    main()
