"""A run directory has one `uid`, a random name of the directory itself, made by who comes first.

Nodes that find another one there do not share it, and another run that begins there has another.
A run at a URL has it in the local folder of each node too: what an older run at that URL left in
the folder would be uploaded as this run's, and its end would be taken for the end of this one.
"""

import secrets

from elastic.config.run_dir import UID, RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.storage.local import LocalStore
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read
from elastic.system.clock import Clock

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


def claim_local_copies(run: RunDir, uid: str, clock: Clock) -> None:
    """Make the local folder that of the run with this `uid`; nothing for a run in a folder.

    Raises UsageError where that cannot be done, or the folder is another run's.
    """
    if not run.is_remote:
        return
    try:
        found = create_or_read(LocalStore(run.local), UID, uid.encode(), clock).decode(errors="replace")
    except StoreFailed as error:
        found = f"{error}"
    if found != uid:
        raise UsageError(
            f"expected to keep the local copies of {run.url} in {run.local}, found: {found:.200}; change its mode, or move it away"
        )
