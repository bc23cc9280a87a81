"""The options lead to a rendezvous backend that answers, and the uploader's fence fits it.

Which nodes take part is not decided here: that is the group's (rendezvous/).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic.agent.finished_run import is_complete
from elastic.agent.settings import Settings
from elastic.checkpoint.catalog import list_commits
from elastic.config import environment
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.observe import metrics_files
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.select import Answer, RendezvousConfig, wait_for
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock
from elastic.system.files import listing
from elastic.system.untrusted import parse_number

C10D_GROUP = "run"  # by default
_CLOCK = SystemClock()


def rendezvous_config(options: Options, run: RunDir, uid: str) -> RendezvousConfig:
    """Where the group meets. The options were checked before. uid: of the run directory.

    etcd serves many runs, so the group has the uid as its name there. A node of the run serves the
    c10d store, for this run alone: nodes that do not share the run directory meet there all the
    same, and are refused.
    """
    endpoint = options.rdzv_endpoint
    if options.meets_in_objects:
        return RendezvousConfig(kind="objects", endpoint=endpoint or run.rendezvous_url, group="")
    if options.rdzv_backend == "dir":
        folder = run.rendezvous if endpoint is None else Path(endpoint.removeprefix("file://")).absolute()
        return RendezvousConfig(kind="dir", endpoint=str(folder), group="")
    assert endpoint is not None, "options without it are refused"
    group = options.rdzv_id or (uid if options.rdzv_backend == "etcd" else C10D_GROUP)
    return RendezvousConfig(kind=options.rdzv_backend, endpoint=endpoint, group=group)


def open_backend(settings: Settings) -> Backend:
    """Return once the backend answers; raises as `answer_of` does."""
    backend = settings.rendezvous.open(environment.variables())
    # A folder answers at once, unless a power cut has torn the newest version of the group.
    answer_of(backend.read, settings)
    return backend


def answer_of(call: Callable[[], Answer], settings: Settings) -> Answer:
    """What a call to the backend returns, which is tried again while it fails.

    Raises UsageError when it refuses, RendezvousTimeout when it does not answer within
    --rdzv-timeout, GroupEnded when it does not answer and the run is complete.
    """
    return wait_for(
        call,
        patience_s=settings.options.rdzv_timeout_s,
        clock=_CLOCK,
        notify=partial(print, flush=True),
        is_complete=partial(is_complete, settings),
    )


def newest_generation(run: RunDir) -> int:
    """The newest generation that left a checkpoint, a log or metrics in the run directory, or 0.

    For a backend that does not know it: one that keeps its state in memory was restarted, a folder
    was removed, or another endpoint was used meanwhile. Raises UsageError where they cannot be
    read: the number of a generation must not be used twice.
    """
    try:
        records, _ = list_commits(open_store(run.checkpoints_url), _CLOCK)
    except StoreFailed as error:
        raise UsageError(
            f"expected to find the newest generation of the run in {run.checkpoints_url}, found: {error}; give the command again when"
            " the storage answers"
        ) from error
    try:
        newest = _newest_in_files(run)
    except OSError as error:
        raise UsageError(
            f"expected to find the newest generation of the run in {run.local}, found: {error}; change the mode of what cannot be read"
        ) from error
    return max([newest, *(record.generation for record in records)])


def newest_generation_seen(run: RunDir) -> int:
    """The same without checkpoints, for a node that is about to form the next generation: it waits
    for no storage. Files that cannot be read show nothing.
    """
    try:
        return _newest_in_files(run)
    except OSError:
        return 0


def _newest_in_files(run: RunDir) -> int:
    """Raises OSError."""
    logs = [parse_number(path.name) for path in listing(run.logs)]
    return max([metrics_files.newest_generation(run.metrics), *filter(None, logs)])
