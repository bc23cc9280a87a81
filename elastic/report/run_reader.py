"""What a run's files say of it, as often as it is asked; each line is read once.

Events are read before steps, which are written first: the step that an event tells of is there.
What a file that is gone had said counts no more. It does not promise that both are of one moment.
"""

from dataclasses import dataclass

from elastic.config.run_dir import RunDir
from elastic.observe.log import EventsReader
from elastic.observe.logged_event import Events
from elastic.observe.step_batch import StepBatch, number
from elastic.observe.step_columns import StepColumns
from elastic.observe.step_line import StepLine
from elastic.observe.step_reader import StepReader
from elastic.report.picture.series import MOST_POINTS, RunSeries


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """trained, series: what counts of the lines of metrics. newest: the last of them."""

    events: Events
    trained: StepColumns
    series: RunSeries
    newest: StepLine | None


class RunReader:
    def __init__(self, run: RunDir, *, most_points: int = MOST_POINTS, with_series: bool = True) -> None:
        """most_points: of each series. with_series: else they stay empty, which takes less time."""
        self._events = EventsReader(run.events)
        self._steps = StepReader(run.metrics, with_values=with_series)
        self._most_points, self._with_series = most_points, with_series
        self._newest: StepLine | None = None
        self._begin()

    def read(self) -> ReadFiles:
        """Raises OSError."""
        events = self._events.read()
        for batch in self._steps.batches():
            if batch is None:
                self._begin()
                continue
            self._trained.add(batch)
            if len(batch):
                if self._with_series:
                    self._series.add(batch)
                self._newest = _last_of(batch)
        return ReadFiles(events=events, trained=self._trained, series=self._series, newest=self._newest)

    def close(self) -> None:
        self._steps.close()

    def _begin(self) -> None:
        self._trained, self._series = StepColumns(), RunSeries(self._most_points)
        self._newest = None


def _last_of(batch: StepBatch) -> StepLine:
    return StepLine(
        step=int(batch.step[-1]),
        loss=batch.loss[-1],
        world_size=batch.world_size[-1],
        generation=int(batch.generation[-1]),
        time=number(batch.time[-1]),
        seconds=number(batch.seconds[-1]),
    )
