"""metrics.jsonl holds one line for each step that counts, in the order of the steps.

One process writes it at a time: rank 0 of the newest generation, which calls `rewind` first. A rank
0 of an older generation that is still alive appends to the file that `rewind` replaced, and that
file has no readers. It does not promise that the newest lines survive a power cut before `sync`.
"""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.observe import step_line
from elastic.observe.log import parse_lines
from elastic.observe.step_line import StepLine
from elastic.system.backlog import NO_ROOM, Backlog
from elastic.system.files import make_folders, open_regular, replace_whole
from elastic.system.growing_file import AppendedFile, last_lines, lines_of

DROPPED_LINES = 4096  # that a rewind tells of, at most
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """What a rewind found. highest: the highest step that was there, or 0.

    last: the newest line that stayed. dropped: those behind it, in their order; of very many the
    first DROPPED_LINES.
    """

    highest: int = 0
    last: StepLine | None = None
    dropped: tuple[StepLine, ...] = ()


class Metrics:
    def __init__(self, path: Path, backlog: Backlog | None = None) -> None:
        """backlog: takes what finds no room on the disk."""
        self._path = path
        self._backlog = backlog
        self._file = AppendedFile(path, backlog)
        self._has_warned = False

    def append(self, line: StepLine) -> None:
        """Write one line.

        A full or failing disk costs the line, not the training, and one message on stderr. Raises
        TypeError if the recipe logged a value that is not JSON, such as a tensor.
        """
        with self._disk_errors_reported():
            self._file.append(line.to_json())

    def rewind(self, step: int) -> Rewound:
        """Drop the lines of steps beyond `step`.

        Raises OSError: a step that stayed in the file would be there twice after the replay.
        """
        with nullcontext() if self._backlog is None else self._backlog.held():
            return self._rewind(step)

    def _rewind(self, step: int) -> Rewound:
        data, backlog = b"", self._backlog
        with suppress(FileNotFoundError), open_regular(self._path) as written:
            data = written.read()
        if backlog is not None:
            data = backlog.applied(self._path, data)
        cut, rewound = _cut(data, step)
        self._file.close()
        # What waits there is written by the agent, and then cut.
        waits = backlog is not None and backlog.waits_for(self._path)
        if (waits or not self._replaced(data[:cut])) and backlog is not None:
            backlog.cut(self._path, cut)
        return rewound

    def _replaced(self, data: bytes) -> bool:
        """Whether there was room for it."""
        try:
            make_folders(self._path.parent)
            # A new file under the old name: an older rank 0 that still has the old file open can
            # write to it, but not into the record.
            replace_whole(self._path, data, fsync=True)
        except OSError as error:
            if self._backlog is None or error.errno not in NO_ROOM:
                raise
            return False
        return True

    def sync(self) -> None:
        """Make the lines so far durable."""
        with self._disk_errors_reported():
            self._file.sync()

    @contextmanager
    def _disk_errors_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                print(
                    f"metrics not written to {self._path} ({error}); training goes on without them",
                    file=sys.stderr,
                )
            self._has_warned = True


def read(path: Path) -> list[StepLine]:
    """The lines of all steps that count, in order; a missing file has none."""
    return list(parse_lines(lines_of(path), step_line.parse))


def newest(path: Path) -> StepLine | None:
    """The newest complete line, read from the end of the file alone; None if there is none."""
    return next(parse_lines(reversed(last_lines(path, _TAIL_BYTES)), step_line.parse), None)


def _cut(data: bytes, step: int) -> tuple[int, Rewound]:
    """(where the lines of steps up to `step` end, what lies around that place).

    Lines are in the order of steps, so the search starts at the end and reads only what is dropped.
    """
    highest, dropped = 0, deque[StepLine](maxlen=DROPPED_LINES)
    end = data.rfind(b"\n") + 1
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        for line in parse_lines([data[start : end - 1]], step_line.parse):
            highest = max(highest, line.step)
            if line.step <= step:
                return end, Rewound(highest=highest, last=line, dropped=tuple(dropped))
            dropped.appendleft(line)
        end = start
    return 0, Rewound(highest=highest, dropped=tuple(dropped))
