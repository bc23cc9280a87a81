"""What a run's files say of it, as often as it is asked; each line is read once.

Events are read before steps, which are written first: the step that an event tells of is there.
What a file that is gone had said counts no more. It does not promise that both are of one moment.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from elastic.config.run_dir import RunDir
from elastic.observe import metrics, metrics_files
from elastic.observe.log import EventsReader
from elastic.observe.logged_event import Events
from elastic.observe.one_clock import ahead_of_generations
from elastic.observe.step_batch import StepBatch, number
from elastic.observe.step_columns import StepColumns
from elastic.observe.step_line import StepLine
from elastic.observe.step_reader import StepReader
from elastic.report.status import Status, status
from elastic.system.clock import file_time_s
from elastic.system.files import listing


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """trained: what counts of the lines of metrics. newest: the last of them."""

    events: Events
    trained: StepColumns
    newest: StepLine | None


class RunReader:
    def __init__(self, run: RunDir) -> None:
        self._events = EventsReader(run.events)
        self._steps = StepReader(run.metrics, with_values=False)
        self._newest: StepLine | None = None
        self._begin()

    def read(self) -> ReadFiles:
        """Raises OSError."""
        events = self._events.read()
        ahead = ahead_of_generations(events)
        for raw in self._steps.batches():
            if raw is None:
                self._begin()
                continue
            batch = raw.moved(ahead)
            self._trained.add(batch)
            if len(batch):
                self._newest = _last_of(batch)
        return ReadFiles(events=events, trained=self._trained, newest=self._newest)

    def close(self) -> None:
        self._steps.close()

    def _begin(self) -> None:
        self._trained = StepColumns()
        self._newest = None


def newest_step(run: RunDir, events: Events) -> StepLine | None:
    """events: all of the run. Raises OSError."""
    line = metrics.newest(run.metrics)
    if line is None or line.time is None:
        return line
    return replace(line, time=line.time - ahead_of_generations(events).get(line.generation, 0.0))


def status_now(
    run: RunDir, events: Events, newest: StepLine | None, beat_ages_s: Mapping[str, float]
) -> tuple[Status, float]:
    """(the status, now in seconds since 1970). run: as a folder.

    Now is by the clock of what was recorded: the newest time there, and how long ago its file was
    changed. A wall clock that was set since the command began is another one.
    """
    ages_s = []
    for path in (*listing(run.events), metrics_files.newest_file(run.metrics)):
        with suppress(FileNotFoundError):
            ages_s.append(file_time_s() - path.stat().st_mtime)
    times_s = [each.time for each in events]
    if newest is not None and newest.time is not None:
        times_s.append(newest.time)
    now_s = max(times_s, default=0.0) + max(0.0, min(ages_s, default=0.0))
    return status(events, newest, beat_ages_s, now_s), now_s


def _last_of(batch: StepBatch) -> StepLine:
    return StepLine(
        step=int(batch.step[-1]),
        loss=batch.loss[-1],
        world_size=batch.world_size[-1],
        generation=int(batch.generation[-1]),
        time=number(batch.time[-1]),
        seconds=number(batch.seconds[-1]),
    )
