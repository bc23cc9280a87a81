"""What it costs training to be watched: `/metrics` scraped once a second, and TensorBoard on.

python benchmarks/watching.py [--world 2] [--samples 8] [--steps 150] [--turns 8]

Runs with and without take turns, in changing order, so that other load on the machine hits both.
The figure of a run is its median step; the table shows the ratio of each turn, and their median.
Other load moves such ratios by far more than the aim of 0.5 %, so the table also has what does not
depend on it: the processor time of the agent, which does all the watching, beyond that of an agent
that is not watched, per second of the run. That is the share of one core. It counts from the tenth
step on: before, the agent imports the libraries, which takes half a second.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from steady import BIN, HERE, median_step_s

from elastic.observe import metrics

ADDRESS = re.compile(r"metrics of this agent: (http://\S+)")
TENTH = 10
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """step_s: median. agent_share: processor seconds of the agent in a second of the run."""

    step_s: float
    agent_share: float
    scrapes: int


def train(args: argparse.Namespace, folder: Path, *options: str) -> Turn:
    words = [
        "--run-dir",
        folder / "run",
        "--nproc-per-node",
        args.world,
        "--save-every",
        "100000steps",
        *options,
    ]
    recipe = ["--", args.world, args.samples, args.steps]
    printed = folder / "printed"
    with printed.open("w") as out:
        command = [BIN / "elastic-train", HERE / "resnet_ours.py", *words, *recipe]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        agent = subprocess.Popen([str(w) for w in command], env=environment, stdout=out, stderr=out)
    seen: list[tuple[float, float]] = []  # (now, processor seconds), from the tenth step on
    scrapes = 0
    while agent.poll() is None:
        newest = metrics.newest(folder / "run" / "metrics.jsonl")
        if newest is not None and TENTH <= newest.step < args.steps:
            seen.append((time.monotonic(), processor_s(agent.pid)))
        if found := ADDRESS.search(printed.read_text()):
            with suppress(OSError), urllib.request.urlopen(found[1], timeout=10) as answer:  # noqa: S310
                scrapes += b"elastic_steps_total" in answer.read()
        with suppress(subprocess.TimeoutExpired):
            agent.wait(1.0)
    if agent.returncode:
        sys.exit(f"the run failed:\n{printed.read_text()}")
    lines = metrics.read(folder / "run" / "metrics.jsonl")
    step_s = median_step_s([line.time or 0.0 for line in lines])
    (began_s, before_s), (ended_s, after_s) = seen[0], seen[-1]
    return Turn(step_s=step_s, agent_share=(after_s - before_s) / (ended_s - began_s), scrapes=scrapes)


def processor_s(pid: int) -> float:
    """Of all threads of a process, without its children; 0 where it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="samples a shard")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    table = Table("s/step", "watched", "ratio", "agent", "watched", "scrapes")
    ratios, shares = [], []
    for number in range(args.turns):
        found: dict[bool, Turn] = {}
        for is_watched in (bool(number % 2), not number % 2):
            with tempfile.TemporaryDirectory() as name:
                options = ("--http", "127.0.0.1:0", "--tensorboard", f"{name}/board") if is_watched else ()
                found[is_watched] = train(args, Path(name), *options)
        plain, watched = found[False], found[True]
        ratios.append(watched.step_s / plain.step_s)
        shares.append(watched.agent_share - plain.agent_share)
        row = (f"{plain.step_s:.4f}", f"{watched.step_s:.4f}", f"{ratios[-1]:.3f}")
        table.add_row(*row, f"{plain.agent_share:.2%}", f"{watched.agent_share:.2%}", str(watched.scrapes))
    load = os.getloadavg()[0]
    table.title = (
        f"ResNet-18 32x32, {args.samples} samples a shard, world {args.world}, load of the machine {load:.0f}"
    )
    Console().print(table)
    print(f"medians: ratio {statistics.median(ratios):.4f}, {statistics.median(shares):.2%} of one core more")


if __name__ == "__main__":
    main()
