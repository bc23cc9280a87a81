"""TensorBoard's event files of one run; each says from which step on it replaces those before it.

TensorBoard reads the files of a folder in the order of their names. A file that begins with a
session that starts at step n makes it drop what earlier files have of step n and later. The names
are numbered, and not stamped by a clock: the next file may be begun by another node.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import text as text_summary

from elastic.observe.step_line import StepLine
from elastic.system.files import listing, make_folders

_VERSION = "brain.Event:2"
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
_DEEPEST = 8  # dicts in dicts that a recipe logs


class EventFile:
    """Calls raise OSError."""

    def __init__(self, folder: Path, *, writer: str, first_step: int, now: float) -> None:
        """writer: a name for people. first_step: what is there of it and later ones is replaced."""
        make_folders(folder)
        numbers = [int(match[1]) for path in listing(folder) if (match := _NAME.fullmatch(path.name))]
        number = max(numbers, default=0) + 1
        self._path = folder / f"events.out.tfevents.{number:010d}.{writer}"
        self._records = RecordWriter(str(self._path))
        self._write(Event(wall_time=now, file_version=_VERSION))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=now, step=first_step, session_log=start))

    def add_step(self, line: StepLine) -> None:
        values = [
            # A name may hold what is no text: half of a pair of surrogates.
            Summary.Value(tag=tag.encode(errors="replace").decode(), simple_value=value)
            for tag, value in scalars_of(line)
        ]
        time = line.time or 0.0
        self._write(Event(wall_time=time, step=line.step, summary=Summary(value=values)))

    def add_text(self, tag: str, text: str, *, step: int, time: float) -> None:
        self._write(Event(wall_time=time, step=step, summary=text_summary(tag, text)))

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        try:
            self._records.close()
        finally:
            # A full disk took nothing, and each try would leave another one.
            with suppress(OSError):
                if not self._path.stat().st_size:
                    self._path.unlink()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def scalars_of(line: StepLine) -> Iterator[tuple[str, float]]:
    """What TensorBoard shows of a step: its numbers. null, which was no finite number, is NaN."""
    yield "loss", _number(line.loss if isinstance(line.loss, int | float) else None)
    if line.seconds is not None:
        yield "elastic/step_seconds", float(line.seconds)
    yield "elastic/world_size", float(line.world_size)
    yield from _numbers_in(line.values, "", 0)


def _numbers_in(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from _numbers_in(value, f"{prefix}{name}/", depth + 1)
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{name}", _number(value)


def _number(value: Any) -> float:
    """As a 32-bit float, which is what the files hold: a larger number becomes the largest one."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan
    return float(max(-LARGEST_FLOAT32, min(LARGEST_FLOAT32, value)))
