"""A line is appended with one write; its readers read it once and whole, and a read is bounded.

A file that is missing, or is no regular file (a link, a pipe), has no lines yet. A file that
replaced another one under the same name, or that was truncated, is read from its start. A last line
without its end stays unread until the end is there.

It does not promise to notice a file that was truncated and grew beyond the old size between two
calls. Calls raise OSError for a file that exists and cannot be read.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from elastic.system import forked_child
from elastic.system.files import NotRegularFile, make_folders, open_regular

LINE_LIMIT_BYTES = 1024 * 1024
WAITING_BYTES = 2 * LINE_LIMIT_BYTES


class AppendedFile:
    """JSON lines of one writer; the file appears with the first.

    Lines that the disk does not take wait in memory, in their order, WAITING_BYTES at most. Each
    later call tries again, and so does a clean exit of a worker. That is said once, and ends
    nothing.
    """

    def __init__(self, path: Path, begin: Callable[[], None] | None = None) -> None:
        """begin: makes the file, where the first line does not. It may raise OSError."""
        self._path = path
        self._begin = begin
        self._fd: int | None = None
        self._waiting = b""
        self._is_said = False

    def append(self, record: dict[str, Any]) -> None:
        """As `json_line`."""
        self.append_line(json_line(record))

    def append_line(self, line: bytes) -> None:
        self._waiting += line
        self.write_waiting()
        if len(self._waiting) > WAITING_BYTES:
            self._waiting = self._waiting[: -len(line)]

    def write_waiting(self) -> None:
        try:
            fd = self.open()
            while self._waiting:
                # One write call for the whole line, on an O_APPEND descriptor: lines never
                # interleave.
                self._waiting = self._waiting[os.write(fd, self._waiting) :]
        except OSError as error:
            self._say(error)

    def sync(self) -> None:
        """Make the lines so far durable, but for those that wait."""
        if self._waiting:
            self.write_waiting()
        if self._fd is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._say(error)

    def open(self) -> int:
        """Returns the descriptor. Raises OSError."""
        if self._fd is None:
            if self._begin is None:
                make_folders(self._path.parent)
            else:
                self._begin()
            # O_NOFOLLOW: anyone with write access to the folder could put a link here, and make
            # this process append to any file of its user.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o644)
            # An earlier process may have been killed in the middle of its write. The next line must
            # not continue its line: both would be lost then.
            size_bytes = os.fstat(self._fd).st_size
            if size_bytes and os.pread(self._fd, 1, size_bytes - 1) != b"\n":
                self._waiting = b"\n" + self._waiting
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()

    def _say(self, error: OSError) -> None:
        if self._is_said:
            return
        self._is_said = True
        forked_child.at_own_exit(self.write_waiting)
        with suppress(OSError, ValueError):  # standard error may have lost its reader
            print(
                f"{self._path} is not written ({error.strerror or error}): its lines wait in memory, {WAITING_BYTES // 2**20} MiB at most, and"
                " are lost with this process; training goes on",
                file=sys.stderr,
            )


class GrowingFile:
    def __init__(self, path: Path, *, read_bytes: int = LINE_LIMIT_BYTES) -> None:
        """One read takes at most `read_bytes`; of a longer line, only its
        end comes.
        """
        self.path = path
        self._read_bytes = read_bytes
        self._file: BinaryIO | None = None
        self.position = 0  # how far it is read
        self.started_over = False  # whether the last call began a file that it had not read before

    def lines_to_end(self) -> Iterator[bytes]:
        """The lines that were completed since the last call, without their ends, from as many reads
        as it takes to reach the end, all of the same file.
        """
        for text in self.texts_to_end():
            yield from text.split(b"\n")[:-1]

    def texts_to_end(self) -> Iterator[bytes]:
        """The same lines with their ends, as many at once as a read gives."""
        self.started_over = not self._is_current()
        if self.started_over:
            self.close()
            with suppress(FileNotFoundError, NotRegularFile):
                self._file = open_regular(self.path)
        return self._texts()

    def _texts(self) -> Iterator[bytes]:
        is_at_end = self._file is None
        while self._file is not None and not is_at_end:
            data = os.pread(self._file.fileno(), self._read_bytes, self.position)
            is_at_end = len(data) < self._read_bytes
            end = data.rfind(b"\n") + 1
            # An unfinished line is read again from its start with the next call: nothing is kept of
            # it, unless it fills a read.
            self.position += end or (0 if is_at_end else len(data))
            yield data[:end]

    def unfinished(self, limit_bytes: int) -> bytes:
        """What follows the lines that were read."""
        return b"" if self._file is None else os.pread(self._file.fileno(), limit_bytes, self.position)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self.position = None, 0

    def _is_current(self) -> bool:
        # The file stays open between two calls because of this comparison: the number of a deleted
        # file may be given to the very file that replaces its successor. While it is open it is
        # not.
        if self._file is None:
            return False
        try:
            named = self.path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._file.fileno())) and named.st_size >= self.position


def json_line(record: dict[str, Any]) -> bytes:
    """With its end. A float that is not finite becomes null, because JSON has no such number.

    Raises TypeError for a value that has no form in JSON, such as a tensor.
    """
    try:
        return msgspec.json.encode(record) + b"\n"
    # A name without an encoding, a key that is no text, a class of its own that JSON takes for one.
    except (TypeError, UnicodeError, OverflowError):
        text = json.dumps(json.loads(json.dumps(record), parse_constant=lambda _: None))
        return f"{text}\n".encode()


def lines_of(path: Path) -> Iterator[bytes]:
    """The complete lines that a file has now, without their ends."""
    with closing(GrowingFile(path)) as file:
        yield from file.lines_to_end()


def size_bytes(path: Path) -> int:
    """0 for what cannot be found."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def read_from(path: Path, position: int, limit_bytes: int) -> bytes:
    """What follows in a file from a position on, torn lines too; nothing if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(position)
        return file.read(limit_bytes)
    return b""


def last_lines(path: Path, tail_bytes: int) -> list[bytes]:
    """The complete lines among the last bytes of a file. The first one may lack its beginning."""
    return read_from(path, max(0, size_bytes(path) - tail_bytes), tail_bytes).split(b"\n")[:-1]
