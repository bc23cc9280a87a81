"""A directory is of one run, and no number of a generation is given twice in it.

A run directory has one `uid`, a random name of the directory itself, made by the first node. Nodes
that find another one there do not share it, and another run that begins there has another. A run at
a URL has it in the local folder of each node too: what an older run at that URL left in the folder
would be uploaded as this run's, and its end would be taken for the end of this one.

The number of a generation that left something behind is not given again, also where those who knew
it are gone. A place to meet that keeps its state in memory may be restarted, a folder removed, or
another endpoint used; then what the generations left in the run directory tells. Were a number
given twice, the parts that two generations upload would have one name, and the second would not be
kept, and a process of the first would not be fenced.
"""

import secrets
from collections.abc import Iterable
from functools import partial

from elastic.checkpoint.catalog import list_commits
from elastic.config.run_dir import UID, RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.observe import metrics, upload_parts
from elastic.storage.local import LocalStore
from elastic.storage.remote import Objects, open_store
from elastic.storage.store import create_or_read, reading
from elastic.system.clock import Clock
from elastic.system.files import listing
from elastic.system.untrusted import parse_number

_CALL_LIMIT_S = 30.0
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


def newest_generation(run: RunDir, clock: Clock) -> int:
    """The newest that left a checkpoint, a log or metrics in the run directory, or 0.

    Raises UsageError where they cannot be read.
    """
    try:
        records, _ = list_commits(open_store(run.checkpoints_url), clock)
        uploaded = _newest_uploaded(run, clock) if run.is_remote else 0
    except StoreFailed as error:
        raise UsageError(
            f"expected to find the newest generation of the run in {run.url}, found: {error}; give the command again when"
            " the storage answers"
        ) from error
    try:
        newest = _newest_in_files(run)
    except OSError as error:
        raise UsageError(
            f"expected to find the newest generation of the run in {run.local}, found: {error}; change the mode of what cannot be read"
        ) from error
    return max([newest, uploaded, *(record.generation for record in records)])


def newest_generation_seen(run: RunDir) -> int:
    """The newest in files of this node, before it forms the next generation: it waits
    for no storage. Files that cannot be read show nothing.
    """
    try:
        return _newest_in_files(run)
    except OSError:
        return 0


def _newest_in_files(run: RunDir) -> int:
    """Raises OSError."""
    return max(metrics.newest_generation(run.metrics), _highest([path.name for path in listing(run.logs)]))


def _newest_uploaded(run: RunDir, clock: Clock) -> int:
    """By other nodes, perhaps. Raises StoreFailed."""
    objects = Objects(run.url, limit_s=_CALL_LIMIT_S)
    found = (
        reading(partial(objects.directly_below, each), clock)
        for each in (upload_parts.METRICS, upload_parts.LOGS)
    )
    return max(map(_highest, found))


def _highest(names: Iterable[str]) -> int:
    """Names of ten characters or more are not those of generations."""
    return max(filter(None, map(parse_number, (each for each in names if len(each) < 10))), default=0)
