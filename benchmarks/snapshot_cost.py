"""What a snapshot after every step costs, and what `auto` chooses: seconds per step beside the same run without snapshots, in turns.

python benchmarks/snapshot_cost.py [--repeats 5] [--steps 40] [--samples 32]

ResNet-18 on 32x32 noise, two workers of one node on gloo, shards = workers. Each turn runs all settings one after another, so that what else the machine does hits all;
the table shows medians over turns, and the median and the spread of the turns' ratios to `off`.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from steady import BIN, HERE, median_step_s, run

SETTINGS = ("off", "1", "auto")
WORKERS = 2


def turn(args: argparse.Namespace, every: str) -> tuple[float, str]:
    """(seconds per step, what `auto` chose last)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        words = [BIN / "elastic-train", HERE / "resnet_ours.py", "--run-dir", folder]
        words += ["--nproc-per-node", WORKERS, "--save-every", "100000steps", "--snapshot-every", every]
        run([*words, "--", WORKERS, args.samples, args.steps])
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        events = [
            json.loads(line) for path in folder.glob("events/*") for line in path.read_text().splitlines()
        ]
    chosen = [str(e["every"]) for e in events if e["event"] == "snapshot_interval"]
    return median_step_s([line["time"] for line in lines]), chosen[-1] if chosen else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=32, help="samples a shard")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    turns = [{every: turn(args, every) for every in SETTINGS} for _ in range(args.repeats)]
    table = Table(
        "snapshots",
        "s/step",
        "ratio to off",
        "ratios of the turns",
        "auto's interval",
        title=f"ResNet-18 32x32, {args.samples} samples a shard, {WORKERS} workers",
    )
    for every in SETTINGS:
        seconds = statistics.median(each[every][0] for each in turns)
        ratios = [each[every][0] / each["off"][0] for each in turns]
        shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
        chosen = " ".join(each[every][1] for each in turns)
        table.add_row(every, f"{seconds:.4f}", f"{statistics.median(ratios):.3f}", shown, chosen)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
