"""Run directories of one path and one command that are not shared are noticed in etcd too.

There the group of each directory has a name of its own, so that nodes which do not share it would
not meet. A signpost, under a name made of the path and the command, names the directory whose nodes
are here. A node of another directory with that path is refused while they live, and replaces the
signpost once they are dead.

It does not promise to notice directories with different paths: two people may train the same.
"""

import hashlib
from collections.abc import Callable

from elastic.errors import UsageError
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.shared_settings import RunKey
from elastic.system.clock import Clock
from elastic.system.silence import Silence

POLL_S = 0.2
KEEP_ALIVES = 2  # so long a group is watched: its first node may be about to join it


def signpost_name(url: str, run: RunKey) -> str:
    return "at-" + hashlib.sha256(f"{run.run_id} {url}".encode()).hexdigest()[:16]


def check_shared(
    open_group: Callable[[str], Backend], url: str, run: RunKey, *, keep_alive_s: float, clock: Clock
) -> None:
    """Put up the signpost for this run directory. open_group: by the name of a group.

    Raises UsageError while nodes of another directory with this path live; BackendFailed.
    """
    signpost = open_group(signpost_name(url, run))
    while True:
        version, found = signpost.read() or (None, b"")
        uid = found.decode(errors="replace")
        if uid == run.uid:
            return
        if uid and _is_alive(open_group(uid), KEEP_ALIVES * keep_alive_s, clock):
            raise UsageError(
                f"the run directory is not shared: nodes with this command train in another {url} ({uid} there, {run.uid} here), and meet in the"
                " same etcd; give all nodes a --run-dir in a folder that they share, or a URL. If this is to be a run of its own, give it"
                " another --rdzv-id"
            )
        if signpost.compare_and_set(version, run.uid.encode()):
            return


def _is_alive(group: Backend, limit_s: float, clock: Clock) -> bool:
    """Whether a heartbeat moves, or comes, within the limit."""
    first, silence, seen_s = group.beats(), Silence(), clock.monotonic()
    while silence.seconds < limit_s:
        clock.sleep(POLL_S)
        if any(first.get(name) != count for name, count in group.beats().items()):
            return True
        now_s = clock.monotonic()
        silence, seen_s = silence.grow(now_s - seen_s, limit_s=limit_s), now_s
    return False
