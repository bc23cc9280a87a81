"""Each line of a run's metrics is read once, in order, and it is said how far the run went back.

A generation that goes on from an older state begins a file of its own, with the lines that stay.
The reader finds where the new file parts from the one that it has read, so that a run of a million
steps is not read again after each fault, but its last `DENSE` lines and one of `DENSE` before. A
poll reads a bounded part.

It does not promise to find that place exactly where the run went back more than `DENSE` steps: then
some lines come a second time, behind a `WentBack` that says so.
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import BinaryIO

from elastic.observe import metrics_files, step_line
from elastic.observe.log import parse_lines
from elastic.observe.step_columns import GenerationSteps, add_step
from elastic.observe.step_line import StepLine
from elastic.system.files import NotRegularFile, open_regular

READ_BYTES = 1024 * 1024
DENSE = 4096
RECENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WentBack:
    """The lines behind that of `step` do not count any more; 0: none counts."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """The steps of all generations up to a line: of the line's own, and behind it of the others.

    steps: None where no line of it has a time. before: up to the last line of another generation.
    """

    generation: int
    steps: GenerationSteps | None
    before: "_Sums | None"

    def by_generation(self) -> dict[int, GenerationSteps]:
        """Lines of an older generation may follow those of a newer one: the last sum counts."""
        found: dict[int, GenerationSteps] = {}
        each: _Sums | None = self
        while each is not None:
            if each.steps is not None:
                found.setdefault(each.generation, each.steps)
            each = each.before
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """One line that was read: where it lies, and the steps of the generations up to it."""

    start: int
    end: int
    line: StepLine
    sums: _Sums


class FollowedMetrics:
    """newest: the last line that counts. generations: the steps that count, by generation."""

    def __init__(self, path: Path, *, dense: int = DENSE, read_bytes: int = READ_BYTES) -> None:
        """path: `metrics.jsonl`, or a node's copy. dense: how many lines have a mark each."""
        self.newest: StepLine | None = None
        self.generations: dict[int, GenerationSteps] = {}
        self.is_at_end = False
        self._path = path
        self._read_bytes = read_bytes
        self._file: BinaryIO | None = None
        self._position = 0
        self._is_skipping = False
        self._sums: _Sums | None = None  # up to the newest line
        self._passed = 0  # lines since the last sparse mark
        self._sparse: list[_Mark] = []
        self._recent: deque[_Mark] = deque(maxlen=dense)
        self._ends: dict[int, deque[StepLine]] = {}  # the last lines of each generation

    def poll(self) -> Iterator[StepLine | WentBack]:
        """What is new, from one read. Raises OSError for a file that cannot be read."""
        file = metrics_files.newest_file(self._path)
        if not self._is_current(file):
            yield from self._change_to(file)
        if self._file is None:
            self.is_at_end = True
            return
        data = os.pread(self._file.fileno(), self._read_bytes, self._position)
        for start, end in self._lines_in(data):
            for line in parse_lines([data[start:end]], step_line.parse):
                add_step(self.generations, line)
                # A recipe may log much in each line, and thousands are kept.
                kept = replace(line, values={})
                self._mark(self._position + start, self._position + end, kept)
                self._ends.setdefault(line.generation, deque(maxlen=RECENT)).append(kept)
                self.newest = line
                yield line
        self._position += self._read_to

    def recent_lines(self, generation: int) -> list[StepLine]:
        """The last lines that count of a generation, as far as they are still at hand."""
        return list(self._ends.get(generation, ()))

    def forget_older_than(self, generation: int) -> None:
        """No recovery will ask for their last lines again."""
        self._ends = {each: lines for each, lines in self._ends.items() if each >= generation}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _is_current(self, file: Path) -> bool:
        if self._file is None:
            return False
        with suppress(FileNotFoundError):
            named = file.lstat()
            is_same = os.path.samestat(named, os.fstat(self._file.fileno()))
            return is_same and named.st_size >= self._position
        return False

    def _change_to(self, file: Path) -> Iterator[WentBack]:
        try:
            opened = open_regular(file)
        except (FileNotFoundError, NotRegularFile):
            return  # it vanished: a newer one is there with the next poll
        kept = self._last_common(opened)
        self.close()
        self._file, self._is_skipping = opened, False
        before = 0 if self.newest is None else self.newest.step
        self._position = 0 if kept is None else kept.end + 1
        self._forget_behind(kept)
        step = 0 if kept is None else kept.line.step
        if step < before:
            yield WentBack(step=step)

    def _last_common(self, opened: BinaryIO) -> _Mark | None:
        """The last marked line up to which the new file has all marked lines at their places.

        A search by halves would not do: behind other lines a line of an older generation may come
        back to the place that it had.
        """
        same = takewhile(lambda mark: self._is_in(opened, mark), chain(self._sparse, self._recent))
        return next(iter(deque(same, maxlen=1)), None)

    def _is_in(self, opened: BinaryIO, mark: _Mark) -> bool:
        if self._file is None:
            return False
        size = mark.end + 1 - mark.start
        ours = os.pread(self._file.fileno(), size, mark.start)
        return len(ours) == size and ours == os.pread(opened.fileno(), size, mark.start)

    def _forget_behind(self, kept: _Mark | None) -> None:
        end = -1 if kept is None else kept.end
        self._sparse = [mark for mark in self._sparse if mark.end <= end]
        self._recent = deque((mark for mark in self._recent if mark.end <= end), maxlen=self._recent.maxlen)
        self.newest = None if kept is None else kept.line
        step = 0 if kept is None else kept.line.step
        self._ends = {
            each: deque((line for line in lines if line.step <= step), maxlen=RECENT)
            for each, lines in self._ends.items()
        }
        self._sums = None if kept is None else kept.sums
        self.generations = {} if kept is None else kept.sums.by_generation()

    def _mark(self, start: int, end: int, line: StepLine) -> None:
        last, generation = self._sums, line.generation
        before = last.before if last is not None and last.generation == generation else last
        sums = _Sums(generation=generation, steps=self.generations.get(generation), before=before)
        self._sums = sums
        mark = _Mark(start=start, end=end, line=line, sums=sums)
        if len(self._recent) == self._recent.maxlen:
            self._passed += 1
            if self._passed >= self._recent.maxlen:
                self._passed = 0
                self._sparse.append(self._recent[0])
        self._recent.append(mark)

    def _lines_in(self, data: bytes) -> Iterator[tuple[int, int]]:
        """(start, end) of each whole line, without its end; sets how far the data are read."""
        self.is_at_end = len(data) < self._read_bytes
        last = data.rfind(b"\n") + 1
        self._read_to = last
        start = 0
        if self._is_skipping and last:
            self._is_skipping = False
            start = data.find(b"\n") + 1  # the end of a line that was too long
        elif not self.is_at_end and not last:
            self._is_skipping = True
            self._read_to = len(data)
        while start < last:
            end = data.find(b"\n", start)
            yield start, end
            start = end + 1
