"""What a run's files say, as often as it is asked; each line is read once.

Events are read before steps, which are written first: the step that an event tells of is there. A
step that was done again is in the metrics once: a restart begins a file of its own (see
metrics.py), which has the lines that still count, and what the file before it had said counts
no more. It does not promise that both are of one moment.

A line that cannot be read is counted; a last line without its end is not there yet.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from elastic.config.run_dir import RunDir
from elastic.observe import logged_event, metrics, series, step_line
from elastic.observe.log import parse_lines, read_events
from elastic.observe.run_view import Record
from elastic.observe.step_columns import NO_STEPS, StepBatch, columns_of, joined
from elastic.system.clock import file_time_s
from elastic.system.files import listing
from elastic.system.growing_file import GrowingFile


class RunReader:
    """Calls raise OSError for what cannot be read."""

    def __init__(self, run: RunDir, *, node: str = "", points: int = 0, with_values: bool = False) -> None:
        """run: in a folder. node: whose own metrics are read where the run is at a URL. points: of
        each curve; 0 for none, which takes less time. with_values: what the recipe logged comes
        with the new steps.
        """
        self._run, self._points, self.has_curves = run, points, points > 0
        self._path = run.metrics_of(node) if node else run.metrics
        self._with_values = with_values or self.has_curves
        self._events: logged_event.Events = []
        self._file = GrowingFile(self._path)  # of the newest metrics
        self._begin()

    def _begin(self) -> None:
        """What came before does not count any more."""
        self._parts, self._num_unreadable = [NO_STEPS], 0
        self._logged = series.LoggedValues()
        self._newest: step_line.StepLine | None = None

    def read(self) -> Record:
        """All up to now."""
        self.read_events()
        for batch in self.new_steps():
            self._parts.append(columns_of(batch.lines))
        self._parts = [joined(self._parts)]
        return Record(
            events=self._events,
            steps=self._parts[0],
            newest=self._newest,
            unreadable_lines=self._num_unreadable,
            age_s=_age_s(self._run, self._path),
            curves=self._logged.curves(self._parts[0], self._points) if self.has_curves else None,
        )

    def read_events(self) -> logged_event.Events:
        """All of them; before the steps."""
        self._events = read_events(self._run.events)
        return self._events

    def new_steps(self) -> Iterator[StepBatch]:
        """The steps completed since the last call, in order; of a file that has begun since, all.

        The caller keeps them: what `read` returns has only steps that `read` itself came upon.
        """
        path = metrics.newest_file(self._path)
        if self._file.path != path:
            self._file.close()
            self._file = GrowingFile(path)
        texts = self._file.texts_to_end()
        if self._file.started_over:  # perhaps there is no file: the run was set aside
            self._begin()
        for text in texts:
            batch = _batch_of(text, with_values=self._with_values)
            self._num_unreadable += batch.num_unreadable
            if self.has_curves:
                self._logged.add(batch)
            if batch.lines:
                self._newest = batch.lines[-1]
            yield batch

    def brief(self) -> Record:
        """What was read, with the newest step alone: it takes no longer for a long run."""
        return Record(events=self._events, steps=NO_STEPS, newest=self._newest, age_s=0.0)

    def close(self) -> None:
        self._file.close()


def read_run(run: RunDir, *, points: int = 0) -> Record:
    """All of a run in a folder, once."""
    with closing(RunReader(run, points=points)) as reader:
        return reader.read()


def read_newest(run: RunDir) -> Record:
    """The same with the newest step alone, however long the run is: for `status`."""
    events, newest = read_events(run.events), metrics.newest(run.metrics)
    return Record(events=events, steps=NO_STEPS, newest=newest, age_s=_age_s(run, run.metrics))


def _batch_of(text: bytes, *, with_values: bool) -> StepBatch:
    """The steps of whole lines."""
    lines: list[step_line.StepLine] = []
    texts = [line for line in text.split(b"\n") if line.strip()]
    for each in texts:
        try:
            lines.append(step_line.parse(_JSON.decode(each)) if with_values else _OWN.decode(each))
        # A name may hold half of a pair of surrogates, which msgspec does not read.
        except (ValueError, RecursionError):
            lines += parse_lines([each], step_line.parse)
    return StepBatch(lines=lines, num_unreadable=len(texts) - len(lines))


_JSON = msgspec.json.Decoder(dict[str, Any])
_OWN = msgspec.json.Decoder(step_line.StepLine)  # four times as fast, and without what the recipe logged


def _age_s(run: RunDir, lines: Path) -> float:
    """How long ago the newest of its files was changed."""
    ages_s = []
    for path in (*listing(run.events), metrics.newest_file(lines)):
        with suppress(FileNotFoundError):
            ages_s.append(file_time_s() - path.stat().st_mtime)
    return max(0.0, min(ages_s, default=0.0))
