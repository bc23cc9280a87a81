"""An event is one JSON line, appended whole, by the only process that writes its file; writing never blocks or ends training.

It does not promise that a line reached the disk: a power cut may lose the newest ones.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.events import Event, is_event
from elastic.system.clock import Clock
from elastic.system.growing_file import lines_of
from elastic.system.untrusted import parse_json


class EventLog:
    def __init__(self, path: Path, *, node: str, clock: Clock) -> None:
        self._path = path
        self._node = node
        self._clock = clock
        self._fd: int | None = None
        self.generation = 0

    def record(self, event: Event) -> None:
        self.record_named(event.name, event.fields())

    def record_named(self, name: str, fields: dict[str, Any]) -> None:
        """Write an event that a recipe defines; `fields` must be JSON."""
        head = {"event": name, "time": self._clock.wall(), "node": self._node, "generation": self.generation}
        line = json.dumps(head | fields) + "\n"
        try:
            # One write of one line on an O_APPEND descriptor: a reader, or a kill, never sees two lines interleaved.
            os.write(self._open(), line.encode())
        except OSError as error:
            # A full or read-only disk must not end a training run because of its diary.
            print(f"event not written ({error}): {line.rstrip()}", file=sys.stderr)

    def _open(self) -> int:
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o644)
        return self._fd


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete JSON lines of a file in order; what is no JSON object is left out."""
    return filter(None, map(as_record, lines_of(path)))


def as_record(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else."""
    try:
        record = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events of a run, of all nodes, by time; what is no event, as `events.py` knows them, is left out."""
    records = [record for path in sorted(directory.glob("*.jsonl")) for record in read_lines(path)]
    return sorted(filter(is_event, records), key=lambda record: float(record["time"]))
