"""Lines that find no room on the disk are kept in memory, in order, and written when there is room.

The memory is a file of the agent's that its workers and its uploader open, so that it outlives them
as the snapshots do: a worker that is killed on a full disk loses no line. Only the process that
created it writes it out. It does not promise more than LIMIT_BYTES, nor anything once that process
is gone: what still waits then is lost.
"""

import errno
import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.system.clock import Clock, SystemClock
from elastic.system.files import make_folders, read_if_there, replace_whole, write_all
from elastic.system.reserve import FULL_ERRNOS

LIMIT_BYTES = 16 * 1024 * 1024
RETRY_S = 1.0
LOCK_S = 5.0
NO_ROOM = FULL_ERRNOS | {errno.EROFS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A change of the file at `path`: it begins with the first `keep_bytes` of the file `base`, or
    goes on (None); then `text` is appended, the bytes of its Latin-1 encoding.
    """

    path: str
    base: str | None
    keep_bytes: int
    text: str

    def to_line(self) -> bytes:
        return json.dumps([self.path, self.base, self.keep_bytes, self.text]).encode() + b"\n"


class Backlog:
    def __init__(self, fd: int, *, is_own: bool, clock: Clock) -> None:
        self._fd = fd
        self._is_own = is_own
        self._clock = clock
        self._tried_s = float("-inf")
        self._is_stuck = False  # another process held the lock for LOCK_S
        self._lock = threading.RLock()
        self._depth = 0

    @staticmethod
    def create(clock: Clock | None = None) -> "Backlog":
        fd = os.memfd_create("elastic-backlog", os.MFD_CLOEXEC)
        # Processes that a script forks share its descriptor, and so the lock below: their lines
        # must not lie on each other even so.
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        return Backlog(fd, is_own=True, clock=SystemClock() if clock is None else clock)

    @staticmethod
    def open(path: str) -> "Backlog":
        """Of another process of this machine, by its `path`; one of its own where that has ended.

        A process without a backlog of its owner's loses no line as long as it lives itself.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return Backlog.create()
        return Backlog(fd, is_own=False, clock=SystemClock())

    @property
    def path(self) -> str:
        """Where other processes of this machine open it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    def append(self, path: Path, data: bytes, *, share: float = 1.0) -> None:
        """Keep bytes that are to be appended to a file.

        share: of the room here that may be in use already. Raises OSError when there is none.
        """
        self._add(_Entry(path=str(path), base=None, keep_bytes=0, text=data.decode("latin-1")), share)

    def begin(self, path: Path, base: Path, keep_bytes: int) -> None:
        """Have a file begin with the first bytes of one that `content` shows. Raises OSError."""
        self._add(_Entry(path=str(path), base=str(base), keep_bytes=keep_bytes, text=""), 1.0)

    def waits_for(self, path: Path) -> bool:
        """Whether something that belongs into this file waits here."""
        return any(each.path == str(path) for each in self._entries())

    def waiting_in(self, folder: Path) -> list[Path]:
        """The files in a folder for which something waits here."""
        paths = dict.fromkeys(Path(each.path) for each in self._entries())
        return [path for path in paths if path.parent == folder]

    def content(self, path: Path) -> bytes:
        """What the file will have. Raises OSError."""
        entries = self._entries()
        needed = {str(path)}
        for each in reversed(entries):
            if each.path in needed and each.base is not None:
                needed.add(each.base)
        contents = {name: read_if_there(Path(name)) for name in needed}
        for each in entries:
            if each.path in needed:
                contents[each.path] = _after(each, contents[each.path], contents.__getitem__)
        return contents[str(path)]

    def write_out(self, *, without: Collection[Path] = (), at_once: bool = False) -> bool:
        """Write what waits into its files, in order; whether that was everything.

        without: files that another process may write now; what waits for them is dropped. A call
        by a process that did not create this does nothing, and so does one soon after one that
        failed, unless it is to be `at_once`.
        """
        now_s = self._clock.monotonic()
        if self.is_empty:
            return True
        if self._is_own and (at_once or now_s - self._tried_s >= RETRY_S):
            with suppress(OSError), self.held():
                self._write_out({str(path) for path in without})
            self._tried_s = float("-inf") if self.is_empty else now_s
        return self.is_empty

    def _write_out(self, done: set[str]) -> None:
        entries = self._entries()
        by_file: dict[str, list[_Entry]] = {}
        for each in entries:
            by_file.setdefault(each.path, []).append(each)
        for path, changes in by_file.items():
            if path not in done:
                try:
                    _write(Path(path), changes)
                except OSError as error:
                    if error.errno in NO_ROOM:
                        break
                    # Of another kind: the file would take none of it later either.
                    print(f"what waited for room in {path} is lost ({error})", file=sys.stderr)
                done.add(path)
        os.ftruncate(self._fd, 0)
        write_all(self._fd, b"".join(each.to_line() for each in entries if each.path not in done))

    def _add(self, entry: _Entry, share: float) -> None:
        line = entry.to_line()
        with self.held():
            size_bytes = os.fstat(self._fd).st_size
            if size_bytes + len(line) > share * LIMIT_BYTES:
                raise OSError(errno.ENOSPC, "No room in memory either", entry.path)
            # A process may have been killed in the middle of its write.
            is_torn = size_bytes > 0 and os.pread(self._fd, 1, size_bytes - 1) != b"\n"
            write_all(self._fd, b"\n" * is_torn + line)

    def _entries(self) -> list[_Entry]:
        data = os.pread(self._fd, 2 * LIMIT_BYTES, 0)
        return [each for line in data.split(b"\n")[:-1] if (each := _parse(line)) is not None]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile no other process adds anything here or writes it out.

        Raises OSError when one that was stopped, or whose disk hangs, holds it for LOCK_S.
        """
        with self._lock:
            if self._depth == 0:
                self._take()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _take(self) -> None:
        # A worker that waits so long for each of its lines would hardly train.
        deadline = self._clock.monotonic() + (0.0 if self._is_stuck else LOCK_S)
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._is_stuck = self._clock.monotonic() >= deadline
                if self._is_stuck:
                    raise
                self._clock.sleep(0.001)
            else:
                self._is_stuck = False
                return


def _parse(line: bytes) -> _Entry | None:
    try:
        path, base, keep_bytes, text = json.loads(line)
    except ValueError:
        return None
    return _Entry(path=path, base=base, keep_bytes=keep_bytes, text=text)


def _after(entry: _Entry, data: bytes, content: Callable[[str], bytes]) -> bytes:
    """What a file with `data` has after the change; content: of another file."""
    if entry.base is not None:
        data = (data if entry.base == entry.path else content(entry.base))[: entry.keep_bytes]
    return data + entry.text.encode("latin-1")


def _write(path: Path, changes: list[_Entry]) -> None:
    make_folders(path.parent)
    if any(each.base is not None for each in changes):
        data = read_if_there(path)
        for each in changes:
            data = _after(each, data, lambda base: read_if_there(Path(base)))
        # A new file under the old name, as in Metrics.rewind.
        replace_whole(path, data, fsync=True)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o644)
    try:
        size_bytes = os.fstat(fd).st_size
        try:
            write_all(fd, b"".join(each.text.encode("latin-1") for each in changes))
        except OSError:
            os.ftruncate(fd, size_bytes)  # all of it comes with the next try
            raise
    finally:
        os.close(fd)
