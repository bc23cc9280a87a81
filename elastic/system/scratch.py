"""A process has a temporary folder of its own, and that of a killed process is removed later.

Its owner holds a lock on a file in it, which the kernel releases when the process is gone, however
it ends. A pid in the name would not tell: another container that shares the temporary folder has
pids of its own. It does not promise to remove folders of other users.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.errors import UsageError

PREFIX = "elastic-"
_LOCK = "lock"


@contextmanager
def scratch_folder(kind: str = "") -> Iterator[Path]:
    """A new folder, which is removed at the end. kind: a word for its name. Raises UsageError."""
    folder, lock = open_scratch(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def open_scratch(kind: str = "") -> tuple[Path, int]:
    """The folder, and the lock of its owner: a descriptor to keep open. Raises UsageError."""
    try:
        _sweep(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX + kind))
        draft = folder / f".{_LOCK}"
        lock = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its name only now: a sweep takes an unlocked one for that of a dead process.
        draft.rename(folder / _LOCK)
    except OSError as error:
        raise UsageError(
            f"expected to write to a temporary folder, found that it fails ({error}); set TMPDIR to a folder that this user may write"
        ) from error
    return folder, lock


def _sweep(temporary: Path) -> None:
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # no lock file, or another user's, or a vanishing one
            lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.geteuid() and not folder.is_symlink():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
