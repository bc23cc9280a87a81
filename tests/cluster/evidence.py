"""The evidence of a run is read once: events of all nodes on one clock, and every checkpoint
verified.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import run_records
from oracle import Evidence, Injection, Record

from elastic.checkpoint.catalog import list_commits, verify
from elastic.config.run_dir import RunDir
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock

HOUR_S = 3600.0


def evidence(
    run: RunDir,
    samples: Path | None = None,
    injections: Sequence[Injection] = (),
    *,
    damaged_steps: Collection[int] = (),
    ahead: Collection[str] = (),
) -> Evidence:
    """Read everything that the run left behind.

    samples: folder to which the recipe wrote the samples of each step.
    damaged_steps: checkpoints that a fault damaged on purpose.
    ahead: nodes whose wall clock was put an hour ahead at some time.
    """
    store, clock = open_store(run.checkpoints_url), SystemClock()
    records, _ = list_commits(store, clock)
    now = clock.wall()
    events = [
        _set_back(event, now) if host(event) in ahead else event for event in run_records.events(run.events)
    ]
    return Evidence(
        events=sorted(events, key=lambda event: event["time"]),
        metrics=run_records.lines(run.metrics),
        commits=[
            {"step": record.step, "digest": record.digest, "created": record.created} for record in records
        ],
        damage=[asdict(damage) for damage in verify(store, clock)],
        injections=injections,
        samples=[] if samples is None else _lines(samples),
        damaged_steps=frozenset(damaged_steps),
    )


def field(event: Record, key: str) -> Any:
    return host(event) if key == "node" else event.get(key)


def host(event: Record) -> str:
    """The node's host name, which is the container's name: a node's id begins with it."""
    return str(event["node"]).split("-", maxsplit=1)[0]


def _set_back(event: Record, now: float) -> Record:
    """Undo the jump of the clock. Events that were written after the jump lie in the future."""
    return event if event["time"] <= now else event | {"time": event["time"] - HOUR_S}


def _lines(folder: Path) -> list[Record]:
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    # A rank may be killed in the middle of a line.
    return [
        json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")
    ]
