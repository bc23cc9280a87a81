"""What went wrong on this machine ends its part once doing it again would not help.

`OwnFailures` remembers it from generation to generation. An error that came back after a restart
ends the run, unless another state may still avoid it; a machine that computes something else than
the others for the second time leaves for good.

The same exception at the same place in two generations in a row would come in the third one too.
This keeps `--max-restarts` for failures that a restart may mend; worker/own_error.py says which
exceptions can be such an error at all. An error between which and the next one new steps lie is not
known again, at whatever step of its process it comes: the run goes on, slowly.
"""

from collections.abc import Iterable, Sequence

from elastic.agent.decide import WorkerExit
from elastic.divergence import Divergence
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
from elastic.rendezvous.group import WorkerFailure
from elastic.system.worker_error import RESTORES_OF_ONE_STATE, RaisedError, WorkerError

# The recipe's text is wrong, whatever the numbers in the state are.
_OF_THE_TEXT = frozenset(
    {"AttributeError", "ModuleNotFoundError", "NameError", "TypeError", "UnboundLocalError"}
)

WRONG_TIMES_TO_LEAVE = 2


class OwnFailures:
    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        # Consecutive failures without a new step which the restored state may have caused: all but
        # those by SIGKILL. The workers skip a state that was restored too often without progress.
        self.suspect = 0
        # Because of which the next workers do steps again; their agreement settles it.
        self.divergence: Divergence | None = None
        self._raised: list[RaisedError] = []  # by this node's workers, in the generation before
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

    def generation_ended(self, raised: list[RaisedError], divergence: Divergence | None) -> None:
        self._raised = raised
        self.divergence = divergence or self.divergence

    def came_back(self, raised: RaisedError | None) -> str | None:
        return came_back(raised, self._raised, self._max_restarts)

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


def came_back(now: RaisedError | None, before: Sequence[RaisedError], max_restarts: int) -> str | None:
    """Why no restart helps, as a sentence; None if one may.

    now: of the worker that failed first. before: of the workers of the generation before this one.
    """
    same = next((each for each in before if now is not None and _identity(each) == _identity(now)), None)
    if now is None or same is None or _may_be_the_state(now, same, max_restarts):
        return None
    place = now.place
    begin = {None: "", 0: " from the beginning"}.get(place.resumed, f" from step {place.resumed}")
    return f"the same error came back {place.where} after a restart{begin}, so that another restart would not help"


def _may_be_the_state(now: RaisedError, before: RaisedError, max_restarts: int) -> bool:
    """Whether the state that was restored may be the cause, and an older one will be tried.

    A state may be damaged in a way that no checksum shows: a number that a machine computed wrongly
    and that was saved as it was. The newest state then brings the same error each time, and after
    RESTORES_OF_ONE_STATE restores it gives way to an older one. Ending the run before would take
    that chance away. There is no such chance where no older state exists, or where --max-restarts
    ends the run before one is tried. And once the error has come back from an older state than
    before, both states would have to be damaged.
    """
    began, began_before = now.place.resumed, before.place.resumed
    if now.kind in _OF_THE_TEXT or began is None or not now.place.has_older:
        return False
    is_from_older = began_before is not None and began < began_before
    return max_restarts > RESTORES_OF_ONE_STATE and not is_from_older


def _identity(error: RaisedError) -> tuple[str, ...]:
    # The place names the step in work: where it is the same, no new step lies between.
    return error.kind, error.message, error.line, error.place.where


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
