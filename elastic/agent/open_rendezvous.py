"""Whatever backend the options name, the node gets one that answers, and the parts that depend on it fit together.

It does not decide who takes part: that is the group's.
"""

from pathlib import Path

from elastic.checkpoint.catalog import committed
from elastic.config import environment
from elastic.config.identity import NAME
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.events import GOODBYES
from elastic.observe.log import read_events
from elastic.rendezvous.backends.backend import Backend, PublishesGeneration
from elastic.rendezvous.backends.heartbeat_ages import heartbeat_ages_s
from elastic.rendezvous.backends.select import RendezvousConfig, active_nodes, wait_for
from elastic.storage.remote import open_store
from elastic.system.clock import Clock, SystemClock, timestamp
from elastic.system.untrusted import parse_number
from elastic.uploader.fence import Mirror

IN_USE_S = 30.0


def rendezvous_config(options: Options, run: RunDir) -> RendezvousConfig:
    """The newest generation, which fences the savers of older ones, is told there and nowhere else."""
    endpoint = options.rdzv_endpoint
    if options.meets_in_objects:
        return RendezvousConfig(kind="objects", endpoint=endpoint or run.rendezvous_url, group="")
    if options.rdzv_backend == "dir":
        folder = run.rendezvous if endpoint is None else Path(endpoint).absolute()
        return RendezvousConfig(kind="dir", endpoint=str(folder), group="")
    assert endpoint is not None, "options without it are refused"
    return RendezvousConfig(
        kind=options.rdzv_backend, endpoint=endpoint, group=options.rdzv_id or run.local.name
    )


def open_backend(config: RendezvousConfig, options: Options) -> Backend:
    """Raises UsageError when it says no, RendezvousTimeout when it does not answer within --rdzv-timeout."""
    backend = config.open(environment.variables())
    wait_for(
        backend,
        patience_s=options.rdzv_timeout_s,
        clock=SystemClock(),
        notify=lambda text: print(text, flush=True),
    )
    return backend


def newest_generation(run: RunDir, clock: Clock) -> int:
    """The newest one that left something in the run directory: a backend in somebody's memory forgets them."""
    try:
        records, _ = committed(open_store(run.checkpoints_url), clock)
    except StoreFailed:
        records = []  # the storage is asked again, with patience, by those who load
    logs = (parse_number(path.name) for path in run.logs.glob("*"))
    return max([0, *(record.generation for record in records), *filter(None, logs)])


def show_generation(config: RendezvousConfig, backend: Backend, mirror: Path) -> Mirror | None:
    """What shows the newest generation to the uploader, where it cannot ask for it itself."""
    if config.kind != "c10d":
        return None
    assert isinstance(backend, PublishesGeneration)
    return Mirror(backend.shown_generation, mirror)


def set_aside(
    run: RunDir, config: RendezvousConfig, backend: Backend | None, *, keep_alive_s: float, clock: Clock
) -> None:
    """Rename a used run directory; nothing of it is deleted. Raises UsageError while agents are in it.

    backend: None for a folder, which may be a part of what is renamed.
    """
    # An agent that said goodbye is gone, however young its last beat: exit 76 advises --fresh, which must then work at once.
    gone = {each.node for each in read_events(run.events) if isinstance(each.event, GOODBYES)}
    if backend is None:
        ages_s = heartbeat_ages_s(config.endpoint, now=clock.wall())
        active = {node for node, age_s in ages_s.items() if age_s < IN_USE_S}
    else:
        active = set(active_nodes(backend, clock, keep_alive_s=keep_alive_s))
    if active - gone:
        raise UsageError(
            f"{run.url} is in use, or was until {IN_USE_S:.0f} s ago; stop its agents before --fresh, and give --fresh to one of them only"
        )
    suffix = f".aside-{timestamp(clock.wall())}"
    if run.local.exists():
        run.local.rename(run.local.with_name(run.local.name + suffix))
    if run.is_remote:
        _set_aside_objects(run, suffix)


def _set_aside_objects(run: RunDir, suffix: str) -> None:
    """All but the group's own: its generations go on counting, so that whoever wakes from before stays fenced."""
    import fsspec  # only here: the other stores are opened by the checkpoint package

    files, root = fsspec.core.url_to_fs(run.url, use_listings_cache=False, skip_instance_cache=True)
    root = root.rstrip("/")
    config = f"{root}/{run.rendezvous_url.removeprefix(run.url).strip('/')}/"
    try:
        found = [path for path in files.find(root) if not path.startswith(config)]
    except FileNotFoundError:
        return
    # What makes the run a run goes first: were this to end half-way, nothing of the rest would be taken for a part of the new one.
    for path in sorted(found, key=lambda path: (path != f"{root}/{NAME}", not path.endswith(".json"), path)):
        files.mv(path, f"{root}{suffix}{path.removeprefix(root)}")
