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
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from elastic.agent.parts import AgentParts, Settings
from elastic.observe.reader import RunReader
from elastic.observe.run_view import RunView, view_of
from elastic.observe.step_line import StepLine
from elastic.report.monitors import RankZeroReader
from elastic.system.clock import Clock
from elastic.system.command_end import print_if_read
from elastic.system.files import listing, make_folders, read_if_there, replace_whole
from elastic.system.untrusted import decode

WRITTEN = "written.json"
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
RETRY_S = 10.0
_POLL_S, _STOP_S = 2.0, 5.0
_VERSION = "brain.Event:2"
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """step: the last one in the files, done by `generation`."""

    step: int = 0
    generation: int = 0


class TensorBoard:
    """`--tensorboard DIR`; a monitor of the agent, with a thread of its own.

    Neither the step loop nor the agent's loop waits for it.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        """folder: runs have folders of their own in it."""
        self._folder, self._clock = folder, clock
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._records: tuple[Path, RecordWriter] | None = None  # there is one once it has something
        self._failure = ""  # of the last look, if that failed

    def start(self, parts: AgentParts) -> None:
        run = RankZeroReader(parts, with_values=True)
        self._thread = threading.Thread(target=self._work, args=[run], name="tensorboard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The thread first writes what the run's files hold."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        if self._failure:
            # Not by the console's thread, which has ended by now.
            print_if_read(
                f"the files for TensorBoard lack the run's newest steps ({self._failure})", file=sys.stdout
            )

    def _work(self, run: RankZeroReader) -> None:
        while not self._ending.wait(self.look(run)):
            pass
        self.look(run)
        self._close()

    def look(self, run: RankZeroReader) -> float:
        """Write what is new; returns the seconds until the next look."""
        try:
            if (reader := run.opened()) is None:
                self._close()
            else:
                self._write_new(reader, run.parts.settings)
        # The edge of a thread: the files would stand still without a word.
        except Exception as error:
            with suppress(OSError):
                self._close()
            self._failure = str(error)
            run.failed("nothing is written for TensorBoard", error)
            return RETRY_S
        self._failure = ""
        return _POLL_S

    def _write_new(self, reader: RunReader, settings: Settings) -> None:
        """All becomes visible, and it is noted how far it goes. Raises OSError."""
        folder = self._folder / (re.sub(r"[^A-Za-z0-9._-]", "-", settings.uid).lstrip(".") or "run")
        saved = written = _read(folder / WRITTEN)
        for line in (line for batch in reader.new_steps() for line in batch.lines):
            if line.step <= written.step:
                if line.generation <= written.generation:
                    continue  # it is there
                self._close()  # the next file begins with this step
                written = replace(written, step=line.step - 1)
            if self._records is None:
                self._records = self._begin(folder, written.step + 1, settings.node)
            self._records[1].write(_event_of(line.step, line.time or 0.0, scalars_of(line)))
            written = Written(step=line.step, generation=line.generation)
        if written != saved and self._records is not None:
            figures = _figures(view_of(reader.brief(), {}))
            self._records[1].write(_event_of(written.step, self._clock.wall(), figures))
            self._records[1].flush()
            replace_whole(folder / WRITTEN, json.dumps(asdict(written)).encode(), fsync=False)

    def _begin(self, folder: Path, step: int, node: str) -> tuple[Path, RecordWriter]:
        make_folders(folder)
        found = (_NAME.fullmatch(path.name) for path in listing(folder))
        number = 1 + max((int(match[1]) for match in found if match), default=0)
        path, now_s = folder / f"events.out.tfevents.{number:010d}.{node}", self._clock.wall()
        records, start = RecordWriter(str(path)), SessionLog(status=SessionLog.START)
        records.write(Event(wall_time=now_s, file_version=_VERSION).SerializeToString())
        records.write(Event(wall_time=now_s, step=step, session_log=start).SerializeToString())
        return path, records

    def _close(self) -> None:
        if self._records is None:
            return
        (path, records), self._records = self._records, None
        try:
            records.close()
        finally:
            with suppress(OSError):  # a full disk took nothing, and each try would leave another one
                if not path.stat().st_size:
                    path.unlink()


def _event_of(step: int, time: float, scalars: Iterator[tuple[str, float]]) -> bytes:
    # A name may hold half of a pair of surrogates.
    values = [
        Summary.Value(tag=tag.encode(errors="replace").decode(), simple_value=value) for tag, value in scalars
    ]
    return bytes(Event(wall_time=time, step=step, summary=Summary(value=values)).SerializeToString())


def _figures(view: RunView) -> Iterator[tuple[str, float]]:
    """Figures of the whole run, as they are at its newest step."""
    yield "elastic/rehearsals", float(view.rehearsals.count)
    yield "elastic/overlaps", float(view.overlaps.count)


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
    with suppress(ValueError):
        return decode(Written, read_if_there(path), what=WRITTEN)
    return Written()
