"""--fresh renames a used run directory, in which nothing trains, and deletes nothing of it.

It takes the directory's meeting place before, so that no other command begins in it meanwhile. It
does not promise that a process which slept through all of that sees it at once: such a process
finds itself fenced, since the group's state stays. A run directory at a URL is refused before
(`preflight.check_command`): an object store renames nothing at once.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic.config.identity import NAME
from elastic.config.run_dir import RunDir
from elastic.errors import ElasticError, UsageError
from elastic.rendezvous import meeting_place
from elastic.rendezvous.meeting_place import ALONE, Place
from elastic.rendezvous.shared_settings import LONGEST_NAME
from elastic.system.clock import Clock, timestamp
from elastic.system.files import listing, sync_folder
from elastic.system.untrusted import printable


def set_aside(run: RunDir, clock: Clock, notify: Callable[[str], None]) -> None:
    """Raises UsageError while the directory is used, or where it cannot be renamed; StoreFailed."""
    marks = run.local / NAME, run.events, run.rendezvous
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
    ours = Place(kind=ALONE, who=who[:LONGEST_NAME])
    meeting_place.Watch(run=run, clock=clock, notify=notify).take(ours)
    aside = run.local.with_name(f"{run.local.name}.aside-{timestamp(clock.wall())}")
    try:
        found = meeting_place.newest(run, clock)
        if found is None or found[1] != ours:
            raise UsageError("another command took it over while this one stood still")
        _rename(run, aside)
    except (ElasticError, OSError) as error:
        raise UsageError(
            f"expected to rename the run directory {run.url}, found: {error}; what was moved by then is in {aside}. Give the"
            " command again, or take another --run-dir"
        ) from error
    finally:
        for folder in (run.local, aside):  # the old run may go on there, under its new name
            with suppress(ElasticError, OSError):
                meeting_place.release(RunDir.parse(str(folder)), ours, clock)


def _rename(run: RunDir, aside: Path) -> None:
    # The group's state stays: its versions and generations go on counting, so that a process of the
    # old run that wakes up late finds itself fenced, and puts no state of its own in their place.
    run.local.rename(aside)
    if (aside / run.rendezvous.name).exists():
        run.local.mkdir(exist_ok=True)
        (aside / run.rendezvous.name).rename(run.rendezvous)
        sync_folder(aside)
        sync_folder(run.local)
    # Before the new run writes anything: what it commits and syncs below a name that a power cut
    # takes back would be lost, and the old run would be there again.
    sync_folder(run.local.parent)
