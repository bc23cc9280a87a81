"""A run directory has one `uid`, a random name of the directory itself, made by who comes first.

Nodes that find another one there do not share it, and another run that begins there has another.
A run at a URL has it in the local folder of each node too: what an older run at that URL left in
the folder would be uploaded as this run's, and its end would be taken for the end of this one. So a
folder of another `uid` is renamed.
"""

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from elastic.config.run_dir import UID, RunDir
from elastic.errors import UsageError
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read
from elastic.system.clock import Clock
from elastic.system.files import make_folders, read_regular, replace_whole, sync_folder

_LONGEST_NAME = 100


def claim_uid(run: RunDir, clock: Clock) -> str:
    """The `uid` of the run directory, which is made unless it is there.

    Raises UsageError for a damaged one, StoreFailed.
    """
    name = "".join(each if each.isprintable() else "-" for each in run.local.name[:_LONGEST_NAME])
    ours = f"{name}-{secrets.token_hex(8)}"
    uid = create_or_read(open_store(run.url), UID, ours.encode(), clock).decode(errors="replace")
    if not uid or len(uid) > 2 * _LONGEST_NAME or not uid.isprintable():
        raise UsageError(
            f"expected the name of the run directory in {run.url}/{UID}, found {uid!r:.80}; remove it"
        )
    return uid


def claim_local_copies(run: RunDir, uid: str) -> None:
    """Make the local folder that of the run with this `uid`; nothing for a run in a folder.

    Raises UsageError where that cannot be found out, or done.
    """
    if not run.is_remote:
        return
    try:
        make_folders(run.local.parent)
        # Several processes of one machine claim at one moment. Closing it releases the lock. Not
        # every file system has locks.
        above = os.open(run.local.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):
                fcntl.flock(above, fcntl.LOCK_EX)
            _claim(run.local, uid)
        finally:
            os.close(above)
    except OSError as error:
        raise UsageError(
            f"expected to keep the local copies of {run.url} in {run.local}, found: {error}; change its mode, or move it away"
        ) from error


def _claim(folder: Path, uid: str) -> None:
    """Raises OSError."""
    mark, found = folder / UID, ""
    with suppress(FileNotFoundError):
        found = read_regular(mark, limit_bytes=4 * _LONGEST_NAME).decode(errors="replace")
    if found not in ("", uid):
        names = (folder.with_name(f"{folder.name}.old-{number}") for number in range(1, 10_000))
        folder.rename(next(name for name in names if not name.exists()))
        sync_folder(folder.parent)
    if found != uid:
        make_folders(folder)
        replace_whole(mark, uid.encode(), fsync=True)
