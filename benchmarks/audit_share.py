"""The share of a run's time that `--audit auto` costs, from the first step of a process on.

python benchmarks/audit_share.py [--steps 1000] [--shard-ms 12]

At one worker and at two, of a recipe with four shards a step whose forward mostly sleeps, so that
other load on the machine counts less. An audited step costs what it takes longer than the mean of
the other steps of the same run, without the first five: the median would count what other load adds
to some steps of both kinds. The first audit, which is paid to learn the cost, is in the sum.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
WARM_UP = 5
COMMAND = Path(sys.executable).parent / "elastic-train"


def metrics(world_size: int, steps: int, shard_s: float) -> list[dict[str, float]]:
    """The lines of a run's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            COMMAND,
            HERE / "sleeping_recipe.py",
            "--rehearse",
            "off",
            "--run-dir",
            f"{folder}/run",
            "--audit",
            "auto",
        ]
        words += ["--nproc-per-node", world_size, "--save-every", "100000steps", "--", steps, shard_s]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([str(word) for word in words], env=environment, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--shard-ms", type=float, default=12.0)
    args = parser.parse_args()
    table = Table("workers", "ms a step", "ms an audited step", "audited steps", "share of the time")
    for world_size in (1, 2):
        lines = metrics(world_size, args.steps, args.shard_ms / 1e3)
        audited = [line["seconds"] for line in lines if "audited" in line]
        others = [line["seconds"] for line in lines[WARM_UP:] if "audited" not in line]
        step_s = statistics.fmean(others)
        share = sum(seconds - step_s for seconds in audited) / (sum(audited) + sum(others))
        audited_ms = f"{statistics.fmean(audited) * 1e3:.1f}"
        counts = f"{len(audited)} of {len(lines)}"
        table.add_row(str(world_size), f"{step_s * 1e3:.1f}", audited_ms, counts, f"{share:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
