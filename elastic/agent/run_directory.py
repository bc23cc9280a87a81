"""The nodes of a run share one directory and meet in one place, or they are told.

A run directory belongs to one run from the moment in which the first agent claims it. Of two
commands that begin at the same instant one creates `run.json`, and the other is refused by what it
says, before it has written anything. `uid` is a random name of the directory itself: nodes that
find another one there do not share it. It is not a part of `run.json`, because a script without the
library has none.

The options and the directory lead to a rendezvous backend that answers. Which nodes take part is
the group's decision (rendezvous/).

A directory that is moved or removed while a run trains stops nothing: what is saved from then on
goes into a new folder of the old name, until another run begins there (uploader/save.py).
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from elastic.agent.parts import Settings
from elastic.checkpoint.provenance import claim_uid, newest_generation, newest_generation_seen
from elastic.config import environment, identity
from elastic.config.identity import Identity
from elastic.config.options import Options
from elastic.config.run_dir import UID, RunDir
from elastic.errors import ElasticError, StoreFailed, UsageError
from elastic.events import GenerationStarted, RunFinished
from elastic.observe.log import read_rare
from elastic.rendezvous import meeting_place
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.select import Answer, RendezvousConfig, wait_for
from elastic.rendezvous.group import LONGEST_NAME, Node
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.reachability import Probes
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.rendezvous.store_socket import StoreSockets
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read, read_small
from elastic.system.clock import Clock, SystemClock, timestamp
from elastic.system.files import listing
from elastic.system.untrusted import printable

C10D_GROUP = "run"  # by default
_CLOCK = SystemClock()

# Is this the same directory?


def claim(run: RunDir, declared: Identity | None, clock: Clock) -> str:
    """The directory's uid. declared: by a recipe with the library.

    Raises UsageError when the directory belongs to another run, or cannot be written. Of a script
    without the library nothing is written but events, so these tell the kind; at a URL, those here.
    """
    is_plain, store = declared is None, open_store(run.url)
    if any(each.event.plain != is_plain for each in read_rare(run.events, GenerationStarted)):
        kind = "a script without elastic" if is_plain else "a recipe"
        raise UsageError(
            f"expected a run of {kind} in {run.url}, found one of the other kind; take another --run-dir"
        )
    try:
        if declared is not None:
            there = create_or_read(store, identity.NAME, declared.to_json(), clock)
            identity.check(identity.parse(there), declared, run.url)
        return claim_uid(run, clock)
    except StoreFailed as error:
        raise UsageError(
            f"expected to write to the run directory {run.url}, found: {error}; take another --run-dir or change its mode"
        ) from error


def check_claim(settings: Settings) -> None:
    """Raises UsageError where the directory is no longer the claimed one; StoreFailed."""
    run, declared, store = settings.run, settings.declared, open_store(settings.run.url)
    there = None if declared is None else read_small(store, identity.NAME, _CLOCK)
    if read_small(store, UID, _CLOCK) != settings.uid.encode() or (declared is not None and there is None):
        raise UsageError(
            f"{run.url} was set aside, moved or replaced while this command waited to begin in it; give the command again"
        )
    if declared is not None and there is not None:
        identity.check(identity.parse(there), declared, run.url)


def has_recorded_end(run: RunDir) -> bool:
    """Whether a node has written down here that the run is complete, which it stays."""
    return bool(read_rare(run.events, RunFinished))


def is_complete(settings: Settings) -> bool:
    """Whether the run directory says so. Raises UsageError where it has become another run's, and
    StoreFailed. Of plain scripts only the group's state tells which command has ended.
    """
    if not settings.imports_library or not has_recorded_end(settings.run):
        return False
    check_claim(settings)
    return True


def set_aside(run: RunDir, clock: Clock, notify: Callable[[str], None]) -> None:
    """--fresh renames a used run directory, in which nothing trains, and deletes nothing of it.

    It takes the directory's meeting place before, so that no other command begins in it meanwhile.
    It does not promise that a process which slept through all of that sees it at once: such a
    process finds itself fenced, since the group's state stays. A run directory at a URL is refused
    before (`preflight.check_command`): an object store renames nothing at once. Raises UsageError
    while the directory is used, or where it cannot be renamed; StoreFailed.
    """
    marks = run.local / identity.NAME, run.events, run.rendezvous
    try:
        is_used = bool(listing(run.local))
        is_run = any(path.exists() for path in marks)
    except OSError as error:
        raise UsageError(f"expected to read {run.local}, found: {error}; take another --run-dir") from error
    if not is_used:
        return
    if not is_run:
        raise UsageError(
            f"{run.local} holds files and no run, so --fresh leaves it alone; take another --run-dir"
        )
    who = printable(f"a command with --fresh on {socket.gethostname()}, pid {os.getpid()}")
    ours = meeting_place.Place(kind=meeting_place.ALONE, who=who[:LONGEST_NAME])
    meeting_place.Watch(run=run, clock=clock, notify=notify).take(ours)
    aside = run.local.with_name(f"{run.local.name}.aside-{timestamp(clock.wall())}")
    try:
        found = meeting_place.newest(run, clock)
        if found is None or found[1] != ours:
            raise UsageError("another command took it over while this one stood still")
        # The group's state stays: its versions and generations go on counting, so that a process of
        # the old run that wakes up late finds itself fenced, and puts no state of its own in their
        # place.
        run.local.rename(aside)
        if (aside / run.rendezvous.name).exists():
            run.local.mkdir(exist_ok=True)
            (aside / run.rendezvous.name).rename(run.rendezvous)
    except (ElasticError, OSError) as error:
        raise UsageError(
            f"expected to rename the run directory {run.url}, found: {error}; what was moved by then is in {aside}. Give the"
            " command again, or take another --run-dir"
        ) from error
    finally:
        for folder in (run.local, aside):  # the old run may go on there, under its new name
            with suppress(ElasticError, OSError):
                meeting_place.release(RunDir.parse(str(folder)), ours, clock)


# Where do its nodes meet?


def rendezvous_config(options: Options, run: RunDir, there: meeting_place.Place | None) -> RendezvousConfig:
    """Where the group meets. The options were checked before. there: where this run directory's
    nodes have met so far.

    etcd serves many runs, so the name of a group there is made of the command and the path of the
    run directory, and nodes that come by another path find it in the directory. Nodes that do not
    share the directory meet all the same, as in the c10d store that a node serves, and are refused.
    """
    endpoint = options.rdzv_endpoint
    if options.meets_in_objects:
        return RendezvousConfig(kind="objects", endpoint=endpoint or run.rendezvous_url, group="")
    if options.rdzv_backend == "dir":
        folder = run.rendezvous if endpoint is None else Path(endpoint.removeprefix("file://")).absolute()
        return RendezvousConfig(kind="dir", endpoint=str(folder), group="")
    assert endpoint is not None, "options without it are refused"
    group = options.rdzv_id or C10D_GROUP
    if options.rdzv_backend == "etcd" and options.rdzv_id is None:
        command = json.dumps([Path(options.recipe).name, *options.recipe_args, run.url])
        of_command = f"run-{hashlib.sha256(command.encode(errors='replace')).hexdigest()[:16]}"
        group = there.group if there is not None and there.kind == "etcd" else of_command
    return RendezvousConfig(kind=options.rdzv_backend, endpoint=endpoint, group=group)


def open_rendezvous(
    settings: Settings,
    backend: Backend,
    host: StoreSockets,
    probes: Probes,
    newest: int,
    report: Callable[[str], None],
) -> Rendezvous:
    """How this node takes part. newest: the last generation before a run was set aside."""
    options, declared = settings.options, settings.declared
    known = newest_generation(settings.run, _CLOCK)
    return Rendezvous(
        backend,
        Node(id=settings.node, address=host.address, nproc=settings.nproc, port=probes.port),
        GroupPolicy(
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            last_call_s=options.last_call_s,
            timeout_s=options.rdzv_timeout_s,
            max_workers=declared.shards if declared is not None else None,
        ),
        keep_alive_s=options.keep_alive_s,
        clock=_CLOCK,
        open_endpoint=host.open,
        notify=report,
        min_generation=max(newest, known),
        has_begun=known > 0,
        probes=probes,
        run=settings.run_key,
        is_complete=partial(is_complete, settings),
        newest_generation=partial(newest_generation_seen, settings.run),
    )


def take_place(settings: Settings, rendezvous: Rendezvous) -> meeting_place.Place:
    """Meet the others in the one place where the run directory's nodes meet.

    Raises UsageError; RendezvousTimeout when the backend does not answer.
    """
    run, config = settings.run, settings.rendezvous
    watch = meeting_place.Watch(run=run, clock=_CLOCK, notify=partial(print, flush=True))
    is_own = config.endpoint in (run.rendezvous_url, str(run.rendezvous))
    ours = meeting_place.Place(
        kind=config.kind,
        endpoint="" if is_own else config.endpoint,
        group=config.group,
        who=settings.node,
        keep_alive_s=settings.options.keep_alive_s,
    )
    try:
        place = watch.take(ours, check=partial(check_claim, settings))
    except StoreFailed as error:
        raise UsageError(
            f"expected to write where nodes meet into {run.url}, found: {error}; give the command again when that has changed"
        ) from error
    if place != ours:
        watch.check_lost_state(place, partial(answer_of, rendezvous.has_lost_state, settings))
    answer_of(rendezvous.start, settings)
    return place


def release_place(run: RunDir, rendezvous: Rendezvous, place: meeting_place.Place) -> None:
    """The store of c10d ends with its host, after which no command can ask it who lives."""
    with suppress(ElasticError):
        if place.kind == "c10d" and rendezvous.is_deserted():
            meeting_place.release(run, place, _CLOCK)


def open_backend(settings: Settings) -> Backend:
    """Return once the backend answers; raises as `answer_of` does."""
    backend = settings.rendezvous.open(environment.variables())
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
