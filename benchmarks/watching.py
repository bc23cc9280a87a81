"""What it costs training to be watched: `/metrics` scraped once a second, TensorBoard on, and the
page of `serve` open in a browser on the same machine, which asks every two seconds.

python benchmarks/watching.py [--world 2] [--samples 8] [--steps 150] [--turns 8]

Runs with and without take turns, in changing order, so that other load on the machine hits both.
The figure of a run is its median step; the table shows the ratio of each turn, and their median.
Other load moves such ratios by far more than the aim of 0.5 %, so the table also has what does not
depend on it: the processor time of the agent, which does all the watching, beyond that of an agent
that is not watched, per second of the run. That is the share of one core; that of `serve` beside
it. It counts from the tenth step on: before, both import libraries, which takes half a second.
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
PAGE = re.compile(r"is at (http://\S+);")
TENTH = 10
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """step_s: median. agent_share, serve_share: processor seconds in a second of the run."""

    step_s: float
    agent_share: float
    serve_share: float
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
    seen: list[tuple[float, float, float]] = []  # (now, processor seconds), from the tenth step on
    scrapes, server = 0, None
    while agent.poll() is None:
        newest = metrics.newest(folder / "run" / "metrics.jsonl")
        if newest is not None and options and server is None:
            server = Server(folder / "run")
        if newest is not None and TENTH <= newest.step < args.steps:
            of_server = 0.0 if server is None else processor_s(server.process.pid)
            seen.append((time.monotonic(), processor_s(agent.pid), of_server))
        if found := ADDRESS.search(printed.read_text()):
            with suppress(OSError), urllib.request.urlopen(found[1], timeout=10) as answer:  # noqa: S310
                scrapes += b"elastic_steps_total" in answer.read()
        if server is not None:
            server.poll()
        with suppress(subprocess.TimeoutExpired):
            agent.wait(1.0)
    if server is not None:
        server.process.terminate()
        server.process.wait()
    if agent.returncode:
        sys.exit(f"the run failed:\n{printed.read_text()}")
    lines = metrics.read(folder / "run" / "metrics.jsonl")
    step_s = median_step_s([line.time or 0.0 for line in lines])
    (began_s, *before_s), (ended_s, *after_s) = seen[0], seen[-1]
    of_agent, of_server = (
        (after - before) / (ended_s - began_s) for before, after in zip(before_s, after_s, strict=True)
    )
    return Turn(step_s=step_s, agent_share=of_agent, serve_share=of_server, scrapes=scrapes)


class Server:
    """`serve`, and a browser that asks it as the page does."""

    def __init__(self, run: Path) -> None:
        self.process = subprocess.Popen(
            [str(BIN / "elastic-train"), "serve", str(run), "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self._url = PAGE.search(self.process.stdout.readline())[1]  # type: ignore[index]
        self._tag, self._asked_s = "", 0.0

    def poll(self) -> None:
        if time.monotonic() - self._asked_s < 2.0:
            return
        self._asked_s = time.monotonic()
        request = urllib.request.Request(f"{self._url}picture.json", headers={"If-None-Match": self._tag})  # noqa: S310
        with suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            self._tag = answer.headers["ETag"]


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
    table = Table("s/step", "watched", "ratio", "agent", "watched", "serve", "scrapes")
    ratios, shares, of_serve = [], [], []
    for number in range(args.turns):
        found: dict[bool, Turn] = {}
        for is_watched in (bool(number % 2), not number % 2):
            with tempfile.TemporaryDirectory() as name:
                options = ("--http", "127.0.0.1:0", "--tensorboard", f"{name}/board") if is_watched else ()
                found[is_watched] = train(args, Path(name), *options)
        plain, watched = found[False], found[True]
        ratios.append(watched.step_s / plain.step_s)
        shares.append(watched.agent_share - plain.agent_share)
        of_serve.append(watched.serve_share)
        row = (f"{plain.step_s:.4f}", f"{watched.step_s:.4f}", f"{ratios[-1]:.3f}")
        agents = (f"{plain.agent_share:.2%}", f"{watched.agent_share:.2%}")
        table.add_row(*row, *agents, f"{watched.serve_share:.2%}", str(watched.scrapes))
    load = os.getloadavg()[0]
    table.title = (
        f"ResNet-18 32x32, {args.samples} samples a shard, world {args.world}, load of the machine {load:.0f}"
    )
    Console().print(table)
    print(
        f"medians: ratio {statistics.median(ratios):.4f}, {statistics.median(shares):.2%} of one core more,"
        f" and {statistics.median(of_serve):.2%} for serve"
    )


if __name__ == "__main__":
    main()
