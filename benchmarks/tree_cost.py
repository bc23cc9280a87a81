"""What the tree sum costs beside a ring all-reduce: a model to 10 000 ranks, and a measurement.

python benchmarks/tree_cost.py [--megabytes 100] [--latency-us 50] [--gigabit 25] [--buckets 4]
    [--measure 2 3 4 6 8 16] [--json FILE]

The model is the usual one of latency and bandwidth: a message takes `latency` and its bytes at the
bandwidth of one rank's link, and messages of one rank follow each other. --measure runs the sums on
gloo between processes of this machine, which share its processors: seconds there say little, and
the ratio of tree and ring is what the model predicts.
"""

import argparse
import datetime as dt
import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import blocks, span

WORLDS = (2, 3, 8, 12, 64, 96, 512, 1000, 1024, 4096, 8192, 10_000)
ROUNDS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one sum, for one rank: messages that follow each other, and bytes that it sends."""

    messages: int
    sent_bytes: float

    def seconds(self, *, latency_s: float, bytes_per_s: float) -> float:
        return self.messages * latency_s + self.sent_bytes / bytes_per_s


def ring(world: int, size_bytes: float) -> Cost:
    return Cost(messages=2 * (world - 1), sent_bytes=2 * (world - 1) / world * size_bytes)


def tree(world: int, size_bytes: float, shards: int) -> Cost:
    """As `Exchange` does it: halving and doubling, or else chunks."""
    of_ranks = {tuple(block.size for block in blocks(span(shards, world, rank))) for rank in range(world)}
    most = max(len(sizes) for sizes in of_ranks)
    if len(of_ranks) == 1 and most == 1 and world & (world - 1) == 0:
        return Cost(messages=2 * int(math.log2(world)), sent_bytes=2 * (world - 1) / world * size_bytes)
    return Cost(messages=2 * (world - 1), sent_bytes=(most + 1) * (world - 1) / world * size_bytes)


def least_shards(world: int) -> int:
    """The power of two that is at least twice the world, or the world itself where it is one."""
    return world if world & (world - 1) == 0 else 2 ** (math.ceil(math.log2(world)) + 1)


def modelled(world: int, args: argparse.Namespace) -> dict[str, Any]:
    size, shards = args.megabytes * 1e6, least_shards(world)
    link = {"latency_s": args.latency_us * 1e-6, "bytes_per_s": args.gigabit * 1e9 / 8}
    found: dict[str, Any] = {"ranks": world, "shards": shards}
    for name, cost in (
        ("ring", ring(world, size / args.buckets)),
        ("tree", tree(world, size / args.buckets, shards)),
    ):
        found |= {
            f"{name} messages": args.buckets * cost.messages,
            f"{name} MB": round(args.buckets * cost.sent_bytes / 1e6, 1),
            f"{name} s": round(args.buckets * cost.seconds(**link), 4),
        }
    return found


def measured(world: int, megabytes: float) -> dict[str, Any]:
    """The slowest rank of the fastest round: other load on the machine counts least there."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if not pid:
                _run_rank(rank, world, int(megabytes * 1e6 / 4), Path(folder))
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        times = [json.loads(path.read_text()) for path in Path(folder).glob("times-*")]
    rounds = {name: zip(*(each[name] for each in times), strict=True) for name in ("ring", "tree")}
    slowest = {name: min(max(of_ranks) for of_ranks in found) for name, found in rounds.items()}
    size, shards = megabytes * 1e6, least_shards(world)
    ratio = tree(world, size, shards).sent_bytes / ring(world, size).sent_bytes
    return {
        "ranks": world,
        "shards": shards,
        "ring s": round(slowest["ring"], 4),
        "tree s": round(slowest["tree"], 4),
        "tree / ring": round(slowest["tree"] / slowest["ring"], 2),
        "the model's bytes": round(ratio, 2),
    }


def _run_rank(rank: int, world: int, length: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined] # documented
    limit = dt.timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    exchange = Exchange(shards=least_shards(world), world_size=world, rank=rank, group=None)
    vector, times = torch.ones(length), dict[str, list[float]](ring=[], tree=[])
    for _ in range(ROUNDS):
        for name in times:
            parts = {block: vector.clone() for block in blocks(exchange.own_shards)}
            dist.barrier()
            began_s = time.monotonic()
            if name == "ring":
                dist.all_reduce(next(iter(parts.values())))
            else:
                exchange.sum(parts, "the benchmark")
            times[name].append(time.monotonic() - began_s)
    (folder / f"times-{rank}").write_text(json.dumps(times))
    os._exit(0)


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    found = Table(title=title)
    for name in rows[0]:
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(*map(str, row.values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--latency-us", type=float, default=50.0)
    parser.add_argument("--gigabit", type=float, default=25.0)
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--measure", type=int, nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measured(world, args.megabytes) for world in args.measure] if args.measure else []
    title = f"{args.megabytes:g} MB, gloo on {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    if not rows:
        rows = [modelled(world, args) for world in WORLDS]
        title = f"{args.megabytes:g} MB in {args.buckets} buckets, {args.latency_us:g} µs, {args.gigabit:g} Gbit/s"
    Console(width=140).print(table(title, rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
