"""metrics.jsonl holds one line for each step that counts, in the order of the steps.

.metrics-<generation>.jsonl   created whole, exclusively, by rank 0 of the generation; its lines are
                              appended under this name alone
metrics.jsonl                 a second name of the newest of them

One process writes at a time: rank 0 of the newest generation, which calls `rewind` first. A process
may be frozen before any system call, and wake up when a newer generation trains. Then it may still
give the name `metrics.jsonl` to its own, older file, and can do no more harm: the newer file keeps
a name that no older process uses, and readers of this library take that one. The process that woke
up, and each writer with its next `sync`, puts `metrics.jsonl` right.

It does not promise that the newest lines survive a power cut before `sync`; that others who open
`metrics.jsonl` find the newest file in between; nor, where both processes are dead by then, before
the next resume. A link and its file are in one folder, because some file systems have hard links
within a folder only.
"""

import errno
import os
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastic.errors import Fenced, UsageError
from elastic.observe import step_line
from elastic.observe.log import parse_lines
from elastic.observe.step_line import StepLine
from elastic.system.files import FULL, create_whole, link_over, listing, make_folders, read_if_there
from elastic.system.growing_file import LINE_LIMIT_BYTES, AppendedFile, json_line, last_lines, lines_of

DROPPED_LINES = 1024  # that a rewind tells of, at most
_TRIES = 10  # a newer generation begins in each
_TAIL_BYTES = 64 * 1024
_NO_ROOM = FULL | {errno.EROFS}
_MOST_VALUES_BYTES = LINE_LIMIT_BYTES - 48_576  # the rest of a line is far smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """What a rewind found. highest: the highest step that was there, or 0.

    ever: the highest one with a line in any file. last: the newest line that stayed.
    dropped: those behind it, in their order; of very many the first DROPPED_LINES. missing: how
    many steps up to the resumed one have no line, behind the last line.
    """

    highest: int = 0
    ever: int = 0
    last: StepLine | None = None
    dropped: tuple[StepLine, ...] = ()
    missing: int = 0

    @property
    def newest_s(self) -> float | None:
        """When the highest step ended that was there, in seconds since 1970; None if unknown."""
        lines = [line for line in (self.last, *self.dropped[-1:]) if line is not None]
        return next((line.time for line in lines if line.step == self.highest), None)


def own_file(path: Path, generation: int) -> Path:
    """path: `metrics.jsonl`, here and below."""
    return path.with_name(f".{path.stem}-{generation:06d}{path.suffix}")


def files(path: Path) -> dict[int, Path]:
    """Those of generations, in their order. Raises OSError."""
    name = re.compile(rf"\.{re.escape(path.stem)}-(\d{{6,18}}){re.escape(path.suffix)}")
    found = {int(match[1]): file for file in listing(path.parent) if (match := name.fullmatch(file.name))}
    return dict(sorted(found.items()))


def newest_file(path: Path) -> Path:
    """`path` itself where no generation has a file of its own. Raises OSError."""
    own = files(path).values()
    with suppress(FileNotFoundError):
        named = path.lstat()
        # A network file system shows listings that are older than what a name stands for.
        if named.st_nlink > 1 and not any(_is_one_file(named, each) for each in own):
            return path
    return next(reversed(own), path)


def newest_generation(path: Path) -> int:
    """0 for none. Raises OSError."""
    return max(files(path), default=0)


def check_newest(path: Path, generation: int) -> None:
    """Raises Fenced where a newer generation has begun."""
    if (newest := newest_generation(path)) > generation:
        raise Fenced(
            f"expected no metrics of a newer generation than {generation} beside {path}, found those"
            f" of generation {newest}: this process is left over from an older generation"
        )


def name_newest(path: Path) -> None:
    """Have `path` name the newest file. Raises OSError."""
    for _ in range(_TRIES):
        newest = next(reversed(files(path).values()), path)
        # It was removed, because there are newer ones, or waits for room.
        with suppress(FileNotFoundError):
            if _is_one_file(newest.lstat(), path):
                return
            # This process may sleep before the rename; the next look tells.
            link_over(newest, path)


def _is_one_file(about: os.stat_result, path: Path) -> bool:
    """False where `path` names nothing."""
    try:
        return os.path.samestat(about, path.lstat())
    except FileNotFoundError:
        return False


class Metrics:
    """Calls raise OSError but for a disk without room, for which lines wait."""

    def __init__(self, path: Path, *, generation: int, is_copy: bool = False) -> None:
        """generation: the writer's. is_copy: the run is at a URL, and each node has a file of its
        own, so that this one lacks lines that others have uploaded.
        """
        self._path, self._generation, self._is_copy = path, generation, is_copy
        self._own = own_file(path, generation)
        self._file = AppendedFile(self._own)

    def append(self, line: StepLine) -> None:
        """Write one line, now or when the disk takes it.

        Raises TypeError if the recipe logged a value that is not JSON, such as a tensor, and
        UsageError if it logged so much that no reader would take the line.
        """
        text = json_line(line.to_json())
        if len(text) > _MOST_VALUES_BYTES:
            raise UsageError(
                f"step.log: expected at most {_MOST_VALUES_BYTES // 1000} kB of values in a step, found more in step"
                f" {line.step}; log numbers, and write larger values into a file of your own"
            )
        self._file.append_line(text)

    def rewind(self, step: int) -> Rewound:
        """Begin a file with the lines of steps up to `step`.

        Raises OSError: a step that stayed in the file would be there twice after the replay. Raises
        Fenced where a newer generation has done so before.
        """
        check_newest(self._path, self._generation)
        base = newest_file(self._path)
        kept_bytes, rewound = _cut(read_if_there(base), step)
        older = [file for file in files(self._path).values() if file != base]
        last_step = 0 if rewound.last is None else rewound.last.step
        rewound = replace(
            rewound,
            # A file stays until a newer one has as many steps: after a second fault before that, it
            # alone shows how far the run had come.
            ever=max([rewound.highest, *map(_highest, older)]),
            missing=0 if self._is_copy else max(0, step - last_step),
        )
        self._file.close()
        self._file = AppendedFile(self._own, partial(self._begin, base, kept_bytes))
        try:
            self._file.open()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return rewound  # each line tries again
        with suppress(OSError):  # with the next `sync` it is tried again
            name_newest(self._path)
        check_newest(self._path, self._generation)
        for file in older:
            if _highest(file) <= rewound.highest:
                file.unlink(missing_ok=True)
        return rewound

    def _begin(self, base: Path, kept_bytes: int) -> None:
        """Make the own file, of the first bytes of `base`; raises as `rewind`."""
        if not self._own.exists():  # by a try that found no room to make the name durable
            make_folders(self._path.parent)
            create_whole(self._own, read_if_there(base)[:kept_bytes], fsync=True)

    def sync(self) -> None:
        """Make the lines so far durable, but for those that wait, and have the path name the newest
        file: a process that woke up late may have renamed it.
        """
        self._file.sync()
        with suppress(OSError):
            name_newest(self._path)


def read(path: Path) -> list[StepLine]:
    """The lines of all steps that count, in order; a missing file has none."""
    return list(parse_lines(lines_of(newest_file(path)), step_line.parse))


def newest(path: Path) -> StepLine | None:
    """The newest complete line, read from the end of the file alone; None if there is none."""
    return _last_line(newest_file(path))


def newest_lines(path: Path) -> list[StepLine]:
    """Some of the last lines, in order: as many as are read at once."""
    return list(parse_lines(last_lines(newest_file(path), _TAIL_BYTES), step_line.parse))


def _highest(file: Path) -> int:
    line = _last_line(file)
    return 0 if line is None else line.step


def _last_line(file: Path) -> StepLine | None:
    """A recipe may log long lines: the longest that is written is looked for then."""
    for tail_bytes in (_TAIL_BYTES, LINE_LIMIT_BYTES):
        lines = reversed(last_lines(file, tail_bytes))
        if (line := next(parse_lines(lines, step_line.parse), None)) is not None:
            return line
    return None


def _cut(data: bytes, step: int) -> tuple[int, Rewound]:
    """(where the lines of steps up to `step` end, what lies around that place).

    Lines are in the order of steps, so the search starts at the end and reads only the dropped
    lines.
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
