"""Small files can still be written on a full disk: a file of real bytes is given up for them.

The bytes are random, so that no file system stores them as a hole or compresses them. It does not
promise room: other processes may take what was given up before the next try does.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from elastic.system.files import write_all

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})

T = TypeVar("T")


class Reserve:
    """All processes that write into a folder may share one file; each gives up and refills it."""

    def __init__(self, path: Path, *, size_bytes: int, piece_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._piece_bytes = piece_bytes
        self._is_short = True  # as far as this process knows

    def in_room(self, write: Callable[[], T]) -> T:
        """The result of `write`, for which pieces are given up while the disk is full.

        Raises OSError: of `write`, once the reserve is used up.
        """
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in FULL_ERRNOS or not self._give_up_piece():
                    raise

    def refill(self) -> None:
        """Take what is missing as soon as there is room. A call is free while nothing is."""
        if not self._is_short:
            return
        with suppress(OSError):  # still full: the next call tries again
            # O_NOFOLLOW: a link in this place would have this process write elsewhere.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._path, flags, 0o644)
            try:
                missing_bytes = self._size_bytes - os.fstat(fd).st_size
                write_all(fd, os.urandom(max(0, missing_bytes)))
                self._is_short = False
            finally:
                os.close(fd)

    def _give_up_piece(self) -> bool:
        """False where nothing is left."""
        self._is_short = True
        with suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                left_bytes = os.fstat(fd).st_size
                os.ftruncate(fd, max(0, left_bytes - self._piece_bytes))
                return left_bytes > 0
            finally:
                os.close(fd)
        return False
