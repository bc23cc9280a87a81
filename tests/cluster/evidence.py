"""All that a run left behind, read once and put under one clock; every checkpoint is read."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import run_records
from oracle import Evidence, Record, Struck

from elastic.checkpoint.catalog import committed, verify
from elastic.config.run_dir import RunDir
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock

HOUR_S = 3600.0


def evidence(
    run: RunDir,
    samples: Path | None = None,
    struck: Sequence[Struck] = (),
    *,
    spoiled: Collection[int] = (),
    ahead: Collection[str] = (),
) -> Evidence:
    """samples: folder that the recipe wrote down its samples in. ahead: nodes whose wall clocks were put an hour ahead at some time."""
    store, clock = open_store(run.checkpoints_url), SystemClock()
    records, _ = committed(store, clock)
    now = clock.wall()
    events = [
        _set_back(event, now) if host(event) in ahead else event for event in run_records.events(run.events)
    ]
    return Evidence(
        events=sorted(events, key=lambda event: event["time"]),
        metrics=run_records.lines(run.metrics),
        commits=[{"step": record.step, "digest": record.digest} for record in records],
        damage=[asdict(damage) for damage in verify(store, clock)],
        struck=struck,
        samples=[] if samples is None else _lines(samples),
        spoiled=frozenset(spoiled),
    )


def field(event: Record, key: str) -> Any:
    return host(event) if key == "node" else event.get(key)


def host(event: Record) -> str:
    """A node's id begins with its host name, which is the container's."""
    return str(event["node"]).split("-", maxsplit=1)[0]


def _set_back(event: Record, now: float) -> Record:
    """What was written after the clock was put ahead lies in the future."""
    return event if event["time"] <= now else event | {"time": event["time"] - HOUR_S}


def _lines(folder: Path) -> list[Record]:
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    # A rank may be killed in the middle of a line.
    return [
        json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")
    ]
