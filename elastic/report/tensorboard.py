"""What a run's metrics say is in TensorBoard's files, each step once, whatever was done again.

TensorBoard reads the files of a folder in the order of their names. A file whose session starts at
step n makes it drop what earlier files have of step n and later; so the next file replaces what the
run went back over, and what an agent that died had written beyond `written.json`. Names are
numbered, and not stamped by a clock: another node may begin the next file.

Records are written by tensorboardX, and not through its SummaryWriter: that hands them to a thread
of its own, in which a full disk ends the writing without a word.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from elastic.agent.parts import AgentParts
from elastic.agent.settings import Settings
from elastic.observe.run_view import RunView
from elastic.observe.step_columns import StepBatch
from elastic.observe.step_line import StepLine
from elastic.report.follower import Follower
from elastic.system.clock import Clock
from elastic.system.files import listing, make_folders, read_if_there, replace_whole
from elastic.system.output import print_if_read
from elastic.system.untrusted import decode

WRITTEN = "written.json"
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
_STOP_S = 5.0
_VERSION = "brain.Event:2"
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """step: the last one in the files, done by `generation`."""

    step: int = 0
    generation: int = 0


class TensorBoardWriter:
    """Calls raise OSError."""

    def __init__(self, folder: Path, *, writer: str, clock: Clock) -> None:
        """folder: of this run alone. writer: a name for people."""
        self._folder, self._writer, self._clock = folder, writer, clock
        self._saved = self.written = _read(folder / WRITTEN)
        self._records: RecordWriter | None = None  # there is one once it has something
        self._path = folder

    def add(self, steps: StepBatch) -> None:
        for line in steps.lines:
            step, generation = line.step, line.generation
            if step <= self.written.step:
                if generation <= self.written.generation:
                    continue  # it is there
                self.close()  # the next file begins with this step
                self.written = replace(self.written, step=step - 1)
            values = [
                # A name may hold half of a pair of surrogates.
                Summary.Value(tag=tag.encode(errors="replace").decode(), simple_value=value)
                for tag, value in scalars_of(line)
            ]
            self._write(Event(wall_time=line.time or 0.0, step=step, summary=Summary(value=values)))
            self.written = replace(self.written, step=step, generation=generation)

    def show(self, _view: RunView) -> None:
        """All becomes visible, and it is noted how far it goes."""
        if self.written != self._saved:
            if self._records is not None:
                self._records.flush()
            replace_whole(self._folder / WRITTEN, json.dumps(asdict(self.written)).encode(), fsync=False)
            self._saved = self.written

    def close(self) -> None:
        records, self._records = self._records, None
        if records is None:
            return
        try:
            records.close()
        finally:
            with suppress(OSError):  # a full disk took nothing, and each try would leave another one
                if not self._path.stat().st_size:
                    self._path.unlink()

    def _write(self, event: Event) -> None:
        if self._records is None:
            make_folders(self._folder)
            found = (_NAME.fullmatch(path.name) for path in listing(self._folder))
            number = 1 + max((int(match[1]) for match in found if match), default=0)
            self._path = self._folder / f"events.out.tfevents.{number:010d}.{self._writer}"
            self._records = RecordWriter(str(self._path))
            now_s, start = self._clock.wall(), SessionLog(status=SessionLog.START)
            for first in (
                Event(wall_time=now_s, file_version=_VERSION),
                Event(wall_time=now_s, step=self.written.step + 1, session_log=start),
            ):
                self._records.write(first.SerializeToString())
        self._records.write(event.SerializeToString())


class TensorBoard:
    """`--tensorboard DIR`; a monitor of the agent."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """folder: runs have folders of their own in it."""
        self._folder, self._clock = folder, clock
        self._follower = Follower(
            "tensorboard",
            lambda parts: self._writer(parts.settings),
            problem="nothing is written for TensorBoard",
        )

    def start(self, parts: AgentParts) -> None:
        self._follower.start(parts)

    def stop(self) -> None:
        self._follower.stop(_STOP_S)
        if self._follower.failure:
            # Not by the console's thread, which has ended by now.
            print_if_read(
                f"the files for TensorBoard lack the run's newest steps ({self._follower.failure})",
                file=sys.stdout,
            )

    def _writer(self, settings: Settings) -> TensorBoardWriter:
        folder = self._folder / (re.sub(r"[^A-Za-z0-9._-]", "-", settings.uid).lstrip(".") or "run")
        return TensorBoardWriter(folder, writer=settings.node, clock=self._clock)


def scalars_of(line: StepLine) -> Iterator[tuple[str, float]]:
    """What TensorBoard shows of a step: its numbers. null, which was no finite number, is NaN."""
    yield "loss", _number(line.loss if isinstance(line.loss, int | float) else None)
    if line.seconds is not None:
        yield "elastic/step_seconds", line.seconds
    yield "elastic/world_size", float(line.world_size)
    for name, value in line.values.items():
        if value is None or isinstance(value, int | float):
            yield name, _number(value)


def _number(value: Any) -> float:
    """As a 32-bit float, which is what the files hold: a larger number becomes the largest one."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan
    return float(max(-LARGEST_FLOAT32, min(LARGEST_FLOAT32, value)))


def _read(path: Path) -> Written:
    """What cannot be read counts as nothing: then the files are written from the start."""
    with suppress(ValueError, OSError):
        return decode(Written, read_if_there(path), what=WRITTEN)
    return Written()
