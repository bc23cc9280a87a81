"""The local folder of a run at a URL holds the copies of that run, and none of an older one there.

Each node keeps events, logs and metrics in a local folder and uploads them. Another run may begin
at the same URL: in an emptied bucket. What an older one left in this
folder would be uploaded as that run's, and its end would be taken for the end of the new one. So
the folder has the run directory's `uid`, and one with another is renamed.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.config.run_dir import UID, RunDir
from elastic.errors import UsageError
from elastic.system.files import create_whole, make_folders, read_regular, sync_folder

_LIMIT_BYTES = 256
_TRIES = 100


def claim_local_copies(run: RunDir, uid: str) -> None:
    """Make the local folder that of the run with this `uid`; nothing for a run in a folder.

    Raises UsageError where that cannot be found out, or done.
    """
    if not run.is_remote:
        return
    try:
        for _ in range(_TRIES):
            # Another agent of this machine may rename the folder at any moment: then it is made.
            with suppress(FileNotFoundError), _alone(run.local.parent):
                make_folders(run.local)
                if _is_claimed(run.local, uid):
                    return
    except OSError as error:
        raise UsageError(
            f"expected to keep the local copies of {run.url} in {run.local}, found: {error}; change its mode, or move it away"
        ) from error
    raise UsageError(
        f"{run.local} should stay the folder of the run in {run.url}, but others take it; give the command again"
    )


def _is_claimed(folder: Path, uid: str) -> bool:
    """Whether the folder is that run's; a folder of another one is renamed. Raises OSError."""
    mark, found = folder / UID, ""
    with suppress(FileNotFoundError):
        found = read_regular(mark, limit_bytes=_LIMIT_BYTES).decode(errors="replace")
    if found == uid:
        return True
    if not found:
        return create_whole(mark, uid.encode(), fsync=True)
    try:
        folder.rename(_unused_name(folder))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # else another process has just taken that name
            raise
    sync_folder(folder.parent)
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Several processes of one machine claim at one moment, and one after the other may rename.
    Where the file system has no locks, a rename that another one forestalled is tried again.
    """
    make_folders(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unused_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.old-{number}") for number in range(1, 10_000))
    return next(name for name in names if not name.exists())
