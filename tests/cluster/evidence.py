"""The evidence of a run is read once: events of all nodes on one clock, and every checkpoint
verified.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import run_records
from oracle import Evidence, Injection, Record
from wall_clocks import true_time

from elastic.checkpoint.catalog import list_commits, verify
from elastic.config.run_dir import RunDir
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock


def evidence(
    run: RunDir,
    samples: Path | None = None,
    injections: Sequence[Injection] = (),
    *,
    damaged_steps: Collection[int] = (),
) -> Evidence:
    """Read everything that the run left behind, with the times of this machine's clock.

    samples: folder to which the recipe wrote the samples of each step.
    damaged_steps: checkpoints that a fault damaged on purpose.
    """
    store, clock = open_store(run.checkpoints_url), SystemClock()
    records, _ = list_commits(store, clock)
    now = time.time()
    commits = [
        {"step": record.step, "digest": record.digest, "created": true_time(record.created, now)}
        for record in records
    ]
    return Evidence(
        events=on_this_clock(run_records.events(run.events)),
        metrics=[line | {"time": true_time(line["time"], now)} for line in run_records.lines(run.metrics)],
        commits=commits,
        damage=[asdict(damage) for damage in verify(store, clock)],
        injections=injections,
        samples=[] if samples is None else read_lines(samples),
        damaged_steps=frozenset(damaged_steps),
    )


def on_this_clock(events: Sequence[Record]) -> list[Record]:
    """By time, whatever the clocks of their nodes showed."""
    now = time.time()
    there = [event | {"time": true_time(event["time"], now)} for event in events]
    return sorted(there, key=lambda event: float(event["time"]))


def field(event: Record, key: str) -> Any:
    return host(event) if key == "node" else event.get(key)


def host(event: Record) -> str:
    """The node's host name, which is the container's name: a node's id begins with it."""
    return str(event["node"]).split("-", maxsplit=1)[0]


def read_lines(folder: Path) -> list[Record]:
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    # A rank may be killed in the middle of a line.
    return [
        json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")
    ]
