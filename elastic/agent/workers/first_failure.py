"""The worker that failed first is blamed, and a victim only if no culprit is known.

It judges the workers of one node. Which node's report counts is decided by the group: the first one
that closes the generation.
"""

import signal
from collections.abc import Collection, Mapping

from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
from elastic.system.worker_error import WorkerError


def first_failure(
    codes: Mapping[int, int],
    killed: set[int],
    errors: list[WorkerError],
    reason: str,
    ended_within: Collection[int] = (),
) -> WorkerError:
    """The worker to blame for the end of a generation on this node.

    codes: exit codes by rank, in the order in which the agent saw them.
    killed: ranks that the agent itself killed.
    reason: speaks for a culprit that left no error file, as one that was killed from outside.
    ended_within: ranks whose exit code 0 was no end of their loop.
    """
    culprits = [
        rank
        for rank, code in codes.items()
        if rank not in killed
        and (rank in ended_within or code not in (EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST))
    ]
    of_culprits = [error for error in errors if error.rank in culprits]
    # A worker writes its error file, then its sockets close, and only later its exit code is seen.
    # A victim may notice the closed socket and exit before the culprit has: so workers that have
    # written a file and not exited yet are candidates as well, and the earliest file decides.
    of_running = [error for error in errors if error.rank not in codes]
    if of_culprits:
        return min([*of_culprits, *of_running], key=lambda error: error.time)
    if errors and not culprits:
        return min(of_running or errors, key=lambda error: error.time)
    first = culprits[0] if culprits else next(iter(codes), -1)
    return WorkerError(rank=first, message=reason, traceback="", time=0.0)


def was_sigkilled(codes: Mapping[int, int], rank: int) -> bool:
    """Whether SIGKILL ended the worker.

    It comes from outside or for want of memory, so the training state cannot be at fault.
    """
    return codes.get(rank) == -signal.SIGKILL
