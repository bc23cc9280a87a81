"""The number of a generation that left something behind is not given again, also where those who
knew it are gone.

A place to meet that keeps its state in memory may be restarted, a folder removed, or another
endpoint used; then what the generations left in the run directory tells. Were a number given twice,
the parts that two generations upload would have one name, and the second would not be kept, and a
process of the first would not be fenced.
"""

from collections.abc import Iterable
from functools import partial

from elastic.checkpoint.catalog import list_commits
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.observe import metrics_files, upload_parts
from elastic.storage.remote import Objects, open_store
from elastic.storage.store import reading
from elastic.system.clock import Clock
from elastic.system.files import listing
from elastic.system.untrusted import parse_number

_CALL_LIMIT_S = 30.0


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
    return max(
        metrics_files.newest_generation(run.metrics), _highest([path.name for path in listing(run.logs)])
    )


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
