"""What a run's files say, as often as it is asked; each line is read once.

Events are read before steps, which are written first: the step that an event tells of is there. A
step that was done again is in the metrics once: a restart begins a file of its own, which has the
lines that still count, and what the file before it had said counts no more. It does not promise
that both are of one moment.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from elastic.config.run_dir import RunDir
from elastic.observe import metrics, metrics_files
from elastic.observe.log import EventsReader
from elastic.observe.logged_event import Events
from elastic.observe.one_clock import ahead_of_generations
from elastic.observe.run_view import Record
from elastic.observe.series import CurvesOfRun
from elastic.observe.step_batch import StepBatch, number
from elastic.observe.step_columns import StepColumns
from elastic.observe.step_line import StepLine
from elastic.observe.step_reader import StepReader
from elastic.system.clock import file_time_s
from elastic.system.files import listing


class RunReader:
    """Calls raise OSError for what cannot be read."""

    def __init__(self, run: RunDir, *, node: str = "", points: int = 0, with_values: bool = False) -> None:
        """run: in a folder. node: whose own metrics are read where the run is at a URL. points: of
        each curve; 0 for none, which takes less time. with_values: what the recipe logged comes
        with the new steps.
        """
        self._run, self._points = run, points
        self._path = run.metrics_of(node) if node else run.metrics
        self._columns = StepColumns()
        self._events = EventsReader(run.events)
        self._steps = StepReader(self._path, with_values=with_values or points > 0)
        self._events_now: Events = []
        self._newest: StepLine | None = None
        self._begin()

    def read(self) -> Record:
        """All up to now."""
        self.read_events()
        for _ in self.new_steps():
            pass
        return self.record()

    def read_events(self) -> Events:
        """All of them; before the steps."""
        self._events_now = self._events.read()
        return self._events_now

    def new_steps(self) -> Iterator[StepBatch]:
        """What was completed since the last call, in order: of a file that has begun since, all."""
        ahead = ahead_of_generations(self._events_now)
        for raw in self._steps.batches():
            if raw is None:
                self._begin()
                continue
            batch = raw.moved(ahead)
            self._columns.add(batch)
            if self._points:
                self._curves.add(batch)
            if len(batch):
                self._newest = _last_of(batch)
            yield batch

    def record(self) -> Record:
        """As far as it was read."""
        return Record(
            events=self._events_now,
            steps=self._columns,
            newest=self._newest,
            age_s=_age_s(self._run, self._path),
            curves=self._curves.curves() if self._points else None,
        )

    def close(self) -> None:
        self._steps.close()

    def _begin(self) -> None:
        self._columns = StepColumns(durations=self._columns.durations)
        self._curves = CurvesOfRun(self._points)
        self._newest = None


def read_run(run: RunDir, *, points: int = 0) -> Record:
    """All of a run in a folder, once."""
    with closing(RunReader(run, points=points)) as reader:
        return reader.read()


def read_newest(run: RunDir) -> Record:
    """The same with the newest step alone, however long the run is: for `status`."""
    events = EventsReader(run.events).read()
    line = metrics.newest(run.metrics)
    if line is not None and line.time is not None:
        line = replace(line, time=line.time - ahead_of_generations(events).get(line.generation, 0.0))
    return Record(events=events, steps=StepColumns(), newest=line, age_s=_age_s(run, run.metrics))


def _age_s(run: RunDir, lines: Path) -> float:
    """How long ago the newest of its files was changed."""
    ages_s = []
    for path in (*listing(run.events), metrics_files.newest_file(lines)):
        with suppress(FileNotFoundError):
            ages_s.append(file_time_s() - path.stat().st_mtime)
    return max(0.0, min(ages_s, default=0.0))


def _last_of(batch: StepBatch) -> StepLine:
    return StepLine(
        step=int(batch.step[-1]),
        epoch=batch.epoch[-1],
        loss=batch.loss[-1],
        world_size=batch.world_size[-1],
        generation=int(batch.generation[-1]),
        time=number(batch.time[-1]),
        seconds=number(batch.seconds[-1]),
    )
