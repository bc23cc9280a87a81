"""The options lead to a rendezvous backend that answers, and the uploader's fence fits it.

Which nodes take part is not decided here: that is the group's (rendezvous/).
"""

from functools import partial
from pathlib import Path

from elastic.checkpoint.catalog import list_commits
from elastic.config import environment
from elastic.config.identity import NAME
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.events import GOODBYES
from elastic.observe.log import read_events
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.heartbeat_ages import heartbeat_ages_s
from elastic.rendezvous.backends.select import RendezvousConfig, active_nodes, wait_for
from elastic.storage.remote import FsspecStore, open_store
from elastic.system.clock import SystemClock, timestamp
from elastic.system.untrusted import parse_number

IN_USE_S = 30.0
_CLOCK = SystemClock()


def rendezvous_config(options: Options, run: RunDir) -> RendezvousConfig:
    """Where the group meets. The options were checked before."""
    endpoint = options.rdzv_endpoint
    if options.meets_in_objects:
        return RendezvousConfig(kind="objects", endpoint=endpoint or run.rendezvous_url, group="")
    if options.rdzv_backend == "dir":
        folder = run.rendezvous if endpoint is None else Path(endpoint.removeprefix("file://")).absolute()
        return RendezvousConfig(kind="dir", endpoint=str(folder), group="")
    assert endpoint is not None, "options without it are refused"
    return RendezvousConfig(
        kind=options.rdzv_backend, endpoint=endpoint, group=options.rdzv_id or run.local.name
    )


def open_backend(config: RendezvousConfig, options: Options, run: RunDir) -> Backend:
    """Return once the backend answers, and with --fresh after a used run directory was set aside.

    Raises UsageError when it refuses or other agents use the run directory, RendezvousTimeout when
    it does not answer within --rdzv-timeout.
    """
    is_folder = config.kind == "dir"
    if is_folder and options.fresh:
        ages_s = heartbeat_ages_s(config.endpoint, now=_CLOCK.wall())
        set_aside(run, {node for node, age_s in ages_s.items() if age_s < IN_USE_S})
    # Opening a folder creates it. It may lie in the run directory, which was set aside only now.
    backend = config.open(environment.variables())
    notify = partial(print, flush=True)
    wait_for(backend, patience_s=options.rdzv_timeout_s, clock=_CLOCK, notify=notify)
    if options.fresh and not is_folder:
        set_aside(run, set(active_nodes(backend, _CLOCK, keep_alive_s=options.keep_alive_s)))
    return backend


def newest_generation(run: RunDir) -> int:
    """The newest generation that left a checkpoint or a log in the run directory; 0 for none.

    For a backend that does not know it: one that keeps its state in memory was restarted, a folder
    was removed, or another endpoint was used meanwhile.
    """
    try:
        records, _ = list_commits(open_store(run.checkpoints_url), _CLOCK)
    except StoreFailed:
        records = []  # the restore asks the storage again, and waits a minute for it
    logs = (parse_number(path.name) for path in run.logs.glob("*"))
    return max([0, *(record.generation for record in records), *filter(None, logs)])


def set_aside(run: RunDir, active: set[str]) -> None:
    """Rename a used run directory; nothing of it is deleted. Raises UsageError while agents use it.

    active: nodes with young heartbeats.
    """
    # An agent that recorded its end is gone, however young its last heartbeat: exit code 76 advises
    # --fresh, which must then work at once.
    if active - {each.node for each in read_events(run.events) if isinstance(each.event, GOODBYES)}:
        raise UsageError(
            f"{run.url} is in use, or was until {IN_USE_S:.0f} s ago; stop its agents before --fresh, and give --fresh to one of them only"
        )
    marks = run.local / NAME, run.events, run.rendezvous
    if run.local.is_dir() and any(run.local.iterdir()) and not any(path.exists() for path in marks):
        raise UsageError(
            f"{run.local} holds files and no run, so --fresh leaves it alone; take another --run-dir"
        )
    suffix = f".aside-{timestamp(_CLOCK.wall())}"
    if run.local.exists():
        run.local.rename(run.local.with_name(run.local.name + suffix))
    if run.is_remote:
        # The group's state stays: the generations go on counting, so that a process of the old run
        # that wakes up late stays fenced.
        store, of_group = FsspecStore(run.url), run.rendezvous_url.removeprefix(run.url).strip("/") + "/"
        moved = (each.name for each in store.list() if not each.name.startswith(of_group))
        # Objects are moved one by one. run.json goes first and commit records next: if the move
        # stops half-way, the rest is never taken for a part of the new run.
        for name in sorted(moved, key=lambda name: (name != NAME, not name.endswith(".json"), name)):
            store.move(name, suffix)
