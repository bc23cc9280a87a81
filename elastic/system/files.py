"""A small file is put in place whole or not at all, and opening a foreign file never waits.

With fsync, a file has its content on the disk before it has its name, and its name before the call
returns: a power cut leaves the old state or the new one. It does not promise that the content
means anything, nor anything of a file system that answers fsync without doing it.
"""

import ctypes
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from elastic.errors import UsageError

_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None)
_LIBC.sync_file_range.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


class NotRegularFile(OSError):  # noqa: N818 - the name says it
    """A link where none is followed, a pipe, a device, a folder, or a file larger than what belongs
    there.
    """


class NoHardLinks(OSError):  # noqa: N818 - as above
    """The file system cannot give a file a second name."""


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """For reading; follow: also through links. Raises NotRegularFile, or OSError.

    Opening a pipe would wait for its writer, and a device may have no end.
    """
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


def read_if_there(path: Path) -> bytes:
    """The whole content, nothing of a file that is missing. Raises NotRegularFile, or OSError."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        return file.read()
    return b""


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """The whole content. Raises NotRegularFile, also for more than `limit_bytes`, or OSError."""
    with open_regular(path) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise NotRegularFile(errno.EFBIG, f"expected at most {limit_bytes} bytes", str(path))
    return data


def create_whole(path: Path, data: bytes, *, fsync: bool, draft: Path | None = None) -> bool:
    """Make `path` a file with this content unless the name is taken; False when it is.

    draft, fsync: as in `new_file`. Raises NoHardLinks, or OSError.
    """
    with suppress(FileExistsError), new_file(path, replaces=False, fsync=fsync, draft=draft) as file:
        write_all(file.fileno(), data)
        return True
    return False


def replace_whole(path: Path, data: bytes, *, fsync: bool, draft: Path | None = None) -> None:
    """Make `path` a file with this content, in place of what had the name. Raises OSError.

    It is always a new file: a process that has the old one open can no longer change what the name
    stands for.
    """
    with new_file(path, replaces=True, fsync=fsync, draft=draft) as file:
        write_all(file.fileno(), data)


@contextmanager
def new_file(
    path: Path, *, replaces: bool, fsync: bool = True, draft: Path | None = None
) -> Iterator[BinaryIO]:
    """A file to write, which gets the name once the context ends without an error.

    replaces: in place of what had the name. Otherwise FileExistsError is raised where it is taken
    by then: the name is given by a hard link, which appears whole and fails if the name is taken,
    where a rename would replace. fsync: the file survives a power cut from then on. draft: its name
    until then, unused, in the same folder; a crash may leave it behind. Raises NoHardLinks, or
    OSError.
    """
    with _draft(path, draft) as written:
        with written.open("xb") as file:
            yield file
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        if replaces:
            written.replace(path)
        else:
            _link(written, path)
    if fsync:
        sync_folder(path.parent)


def _link(written: Path, path: Path) -> None:
    try:
        os.link(written, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then reports that the name is taken: by
        # us, if both names are one file's. (A backup may give the draft more names.)
        with suppress(FileNotFoundError):
            if os.path.samestat(written.lstat(), path.lstat()):
                return
        raise
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise NoHardLinks(error.errno, error.strerror, str(path)) from error
        raise


def overwrite(path: Path, data: bytes) -> None:
    """Write over a file, which is made where there is none, and leave nothing else in it. Raises
    OSError.

    Most file systems need no room for it where the file is as long already. A reader may see a part
    of it, or what was behind a shorter text.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "wb", buffering=0) as file:
        write_all(file.fileno(), data)
        file.truncate(len(data))


def link_over(source: Path, path: Path) -> None:
    """Make `path` another name of a file, in place of what had the name. Raises OSError.

    It survives a power cut.
    """
    with _draft(path) as draft:
        os.link(source, draft)
        draft.replace(path)  # which does nothing where both are names of one file
    sync_folder(path.parent)


def listing(folder: Path) -> list[Path]:
    """The names in it, in their order; nothing where there is no folder. Raises OSError.

    Path.glob would find nothing in a folder that this user may not read.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(map(Path, entries))
    return []


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are missing, so that they survive a power cut.

    A file in a folder whose own name was never synced is lost with it. Raises OSError.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)
    if not missing and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "expected a folder", str(folder))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def begin_writeback(fd: int, start: int, size_bytes: int) -> None:
    """Have the disk begin with these bytes of a file, as a later fsync would.

    The fsync then waits for little, and it alone reports what went wrong.
    """
    _LIBC.sync_file_range(fd, start, size_bytes, _SYNC_FILE_RANGE_WRITE)


def write_all(fd: int, data: bytes) -> None:
    """`os.write` until nothing is left of `data`."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


@contextmanager
def _draft(path: Path, draft: Path | None = None) -> Iterator[Path]:
    """A name beside `path`, which is free, and is again afterwards."""
    draft = draft or path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # Another user who may write to the folder could put a link under the draft's name if that can
    # be guessed. The link itself is removed, and an exclusive open does not follow a link that
    # comes in the very next moment.
    draft.unlink(missing_ok=True)
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def scratch_folder(kind: str = "") -> Iterator[Path]:
    """A new folder, which is removed at the end. kind: a word for its name. Raises UsageError."""
    folder = open_scratch(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_scratch(kind: str = "") -> Path:
    """Raises UsageError."""
    try:
        return Path(tempfile.mkdtemp(prefix=f"elastic-{kind}"))
    except OSError as error:
        raise UsageError(
            f"expected to write to a temporary folder, found that it fails ({error}); set TMPDIR to a folder that this user may write"
        ) from error
