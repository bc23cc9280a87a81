"""A machine that computes something else than the others for the second time leaves for good.

`OwnFailures` remembers from generation to generation what went wrong on this node, and how often a
restored state may have been the cause. `first_failure` finds the worker to blame.
"""

from collections.abc import Iterable

from elastic.agent.decide import WorkerExit
from elastic.divergence import Divergence
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
from elastic.rendezvous.group import WorkerFailure
from elastic.system.worker_error import WorkerError

WRONG_TIMES_TO_LEAVE = 2


class OwnFailures:
    def __init__(self) -> None:
        # Consecutive failures without a new step which the restored state may have caused: all but
        # those by SIGKILL. The workers skip a state that was restored too often without progress.
        self.suspect = 0
        # Because of which the next workers do steps again; their agreement settles it.
        self.divergence: Divergence | None = None
        self._wrong_steps: list[int] = []  # after which this node was found to have been wrong

    @property
    def is_faulty(self) -> bool:
        return len(self._wrong_steps) >= WRONG_TIMES_TO_LEAVE

    def generation_begins(self, restarts: int) -> None:
        """restarts: the group's count of all failures, which starts from 0 at a new step."""
        self.suspect = min(self.suspect, restarts)

    def count(self, failure: WorkerFailure | None) -> None:
        if failure is not None and not failure.from_outside:
            self.suspect += 1

    def generation_ended(self, divergence: Divergence | None) -> None:
        self.divergence = divergence or self.divergence

    def agree(self, *, was_here: bool) -> str:
        """The workers agree again: forget the difference, and count it if it was this node's.

        Returns a sentence then. A machine that `is_faulty` leaves for good, as on a request.
        """
        known, self.divergence = self.divergence, None
        if known is None or not was_here:
            return ""
        self._wrong_steps.append(known.step)
        if not self.is_faulty:
            return f"this node computed something else at step {known.step}; if it does once more, it leaves the group for good"
        steps = " and ".join(map(str, self._wrong_steps))
        return f"this node was wrong at steps {steps} and leaves the group for good: test its memory and processors, or replace it"


def first_failure(
    exits: Iterable[WorkerExit], killed: set[int], errors: list[WorkerError], reason: str
) -> WorkerError:
    """The worker to blame for the end of a generation on this node.

    exits: in the order in which the agent saw them. killed: ranks that the agent itself killed.
    reason: speaks for a culprit that left no error file, as after a SIGKILL from outside.
    """
    ended = {each.rank: each for each in exits}
    no_failure = EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
    culprits = [
        rank
        for rank, each in ended.items()
        if rank not in killed and (each.is_within_loop or each.code not in no_failure)
    ]
    of_culprits = [error for error in errors if error.rank in culprits]
    # A worker writes its error file, then its sockets close, and only later its exit code is seen.
    # A victim may notice the closed socket and exit before the culprit has: so workers that have
    # written a file and not exited yet are candidates as well, and the earliest file decides.
    of_running = [error for error in errors if error.rank not in ended]
    if of_culprits:
        return min([*of_culprits, *of_running], key=lambda error: error.time)
    if errors and not culprits:
        return min(of_running or errors, key=lambda error: error.time)
    first = next(iter([*culprits, *ended]), -1)
    return WorkerError(rank=first, message=reason, traceback="", time=0.0)
