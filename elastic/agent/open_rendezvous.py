"""The options lead to a rendezvous backend that answers, and the uploader's fence fits it.

Which nodes take part is not decided here: that is the group's (rendezvous/).
"""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic.agent.claim_run_dir import check_claim
from elastic.agent.finished_run import is_complete
from elastic.agent.settings import Settings
from elastic.config import environment
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.rendezvous import meeting_place
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.select import Answer, RendezvousConfig, wait_for
from elastic.rendezvous.meeting_place import Place
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.system.clock import SystemClock

C10D_GROUP = "run"  # by default
_CLOCK = SystemClock()


def rendezvous_config(options: Options, run: RunDir, there: Place | None) -> RendezvousConfig:
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


def take_place(settings: Settings, rendezvous: Rendezvous) -> Place:
    """Meet the others in the one place where the run directory's nodes meet.

    Raises UsageError; RendezvousTimeout when the backend does not answer.
    """
    run, config = settings.run, settings.rendezvous
    is_own = config.endpoint in (run.rendezvous_url, str(run.rendezvous))
    ours = Place(
        kind=config.kind,
        endpoint="" if is_own else config.endpoint,
        group=config.group,
        who=settings.node,
        keep_alive_s=settings.options.keep_alive_s,
    )
    try:
        place = meeting_place.take(
            run,
            ours,
            _CLOCK,
            check=partial(check_claim, run, settings.declared, settings.uid, _CLOCK),
            notify=partial(print, flush=True),
            is_here=lambda token: token == rendezvous.place_of_group,
        )
    except StoreFailed as error:
        raise UsageError(
            f"expected to write where nodes meet into {run.url}, found: {error}; give the command again when that has changed"
        ) from error
    if place != ours:
        is_lost = partial(answer_of, rendezvous.has_lost_state, settings)
        meeting_place.check_lost_state(run, place, is_lost, _CLOCK, partial(print, flush=True))
    rendezvous.use_place(place.token)
    answer_of(rendezvous.check_settings, settings)
    answer_of(rendezvous.start, settings)
    return place


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
