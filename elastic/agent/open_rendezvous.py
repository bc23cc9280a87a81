"""The options lead to a rendezvous backend that answers, and the uploader's fence fits it.

Which nodes take part is not decided here: that is the group's (rendezvous/).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic.agent.finished_run import is_complete
from elastic.agent.settings import Settings
from elastic.config import environment
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.select import Answer, RendezvousConfig, wait_for
from elastic.system.clock import SystemClock

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
