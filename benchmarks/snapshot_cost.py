"""What a snapshot after every step costs, and what `auto` chooses.

python benchmarks/snapshot_cost.py [--repeats 5] [--steps 60] [--samples 32] [--nodes 1]

ResNet-18 trains on 32x32 noise: two workers on gloo, on one node or two, shards = workers. A state
is copied after its step's line is written, and so within the time of the next step. With
`--snapshot-every 2`, every second step therefore contains the cost of a snapshot. Each of these
steps is compared with its two neighbours, which contain none, so that a slow phase of the machine
does not matter. The table shows the medians of each run and of all pairs. A run with `auto` shows
the interval that it chose.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table
from steady_programs import BIN, HERE

WORKERS = 2
WARM_UP = 5


def run(command: list[object]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stdout}\n{done.stderr}")


def train(args: argparse.Namespace, every: str, folder: Path) -> None:
    """Run to the end on all nodes."""
    words = [
        BIN / "elastic-train",
        HERE / "resnet_ours.py",
        "--rehearse",
        "off",
        "--run-dir",
        folder,
        "--save-every",
        "100000steps",
    ]
    words += ["--snapshot-every", every, "--nproc-per-node", WORKERS // args.nodes]
    words += ["--min-nodes", args.nodes, "--max-nodes", args.nodes]
    words += ["--", WORKERS, args.samples, args.steps]
    with ThreadPoolExecutor(args.nodes) as nodes:
        list(nodes.map(run, [words] * args.nodes))


def paired(args: argparse.Namespace) -> list[tuple[float, float]]:
    """For each step after a snapshot, two pairs: the seconds of a neighbour, and of the step
    itself.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        train(args, "2", folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    took = {line["step"]: line["time"] - before["time"] for before, line in itertools.pairwise(lines)}
    # Snapshots are taken after step 1 and then after every second step, so even steps follow one.
    return [
        (took[neighbour], took[step])
        for step in range(WARM_UP + WARM_UP % 2 + 2, max(took), 2)
        for neighbour in (step - 1, step + 1)
    ]


def chosen(args: argparse.Namespace) -> str:
    """The interval that `auto` chose last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        train(args, "auto", folder)
        events = [
            json.loads(line) for path in folder.glob("events/*") for line in path.read_text().splitlines()
        ]
    every = [str(e["every"]) for e in events if e["event"] == "snapshot_interval"]
    return every[-1] if every else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=32, help="samples a shard")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    args = parser.parse_args()
    runs = [paired(args) for _ in range(args.repeats)]
    pairs = [pair for run in runs for pair in run]
    ratios = [statistics.median(following / without for without, following in run) for run in runs]
    table = Table(
        "step",
        "s",
        "ratio",
        "of the runs",
        title=f"ResNet-18 32x32, {args.samples} samples a shard, {WORKERS} workers on {args.nodes} nodes",
    )
    table.add_row("after none", f"{statistics.median(without for without, _ in pairs):.4f}", "1", "")
    table.add_row(
        "after a snapshot",
        f"{statistics.median(following for _, following in pairs):.4f}",
        f"{statistics.median(following / without for without, following in pairs):.3f}",
        " ".join(f"{ratio:.3f}" for ratio in ratios),
    )
    console = Console(width=140)
    console.print(table)
    console.print(f"auto takes one every {chosen(args)} steps")


if __name__ == "__main__":
    main()
