"""A run directory has one `uid`, a random name of the directory itself, made by who comes first.

Nodes that find another one there do not share it, and another run that begins there has another.
"""

import secrets

from elastic.config.run_dir import UID, RunDir
from elastic.errors import UsageError
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
