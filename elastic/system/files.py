"""Opening a file that somebody else may have put there ends at once, whatever it is, and what is read of it is bounded.

It does not promise that the content means anything.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegularFile(OSError):  # noqa: N818 - it says what is wrong
    """A link, where none is followed, a pipe, a device, a folder, or a file that is larger than what belongs there."""


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """For reading. Raises NotRegularFile (opening a pipe would wait for ever, a device may have no end), or OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegularFile(errno.ELOOP, "expected a plain file, found a link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularFile(errno.EINVAL, "expected a plain file", str(path))
    return os.fdopen(fd, "rb")


def read_small(path: Path, limit_bytes: int) -> bytes:
    """The whole content. Raises NotRegularFile, also for more than `limit_bytes`, or OSError."""
    with open_regular(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise NotRegularFile(errno.EFBIG, f"expected at most {limit_bytes} bytes", str(path))
    return data
