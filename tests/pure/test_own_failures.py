"""What went wrong on a node is counted, and the worker that failed first is blamed."""

import pytest

from elastic.agent.decide import WorkerExit
from elastic.agent.own_failures import OwnFailures, first_failure
from elastic.divergence import Divergence
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST
from elastic.rendezvous.group import WorkerFailure
from elastic.system.worker_error import WorkerError


def test_only_failures_of_the_state_count_against_it():
    """SIGKILL comes from outside. A new step clears what the group counted before it."""
    own = OwnFailures()
    for from_outside in (False, True, False):
        failure = WorkerFailure(node="n", rank=0, message="m", traceback="", from_outside=from_outside)
        own.count(failure)
    own.count(None)
    assert own.suspect == 2
    own.generation_begins(restarts=3)
    assert own.suspect == 2
    own.generation_begins(restarts=0)
    assert own.suspect == 0


def test_a_machine_that_was_wrong_twice_is_faulty():
    """A difference that lay elsewhere, and one that nobody knows of, do not count."""
    own = OwnFailures()

    def differ(step, *, was_here):
        own.generation_ended(Divergence(generation=1, step=step, agreed=0, entry=""))
        return own.agree(was_here=was_here)

    assert differ(2, was_here=False) == own.agree(was_here=True) == ""
    assert "computed something else at step 5" in differ(5, was_here=True)
    assert own.divergence is None and not own.is_faulty
    assert "was wrong at steps 5 and 9" in differ(9, was_here=True)
    assert own.is_faulty


@pytest.mark.parametrize(
    ("codes", "killed", "files", "blamed"),
    [
        # The earliest culprit, even if a victim was seen first.
        ({2: EXIT_PEER_LOST, 1: EXIT_FAILED, 0: EXIT_FAILED}, set(), {2: 1.0, 1: 3.0, 0: 2.0}, 0),
        # SIGKILL leaves no file; the broken collective of its peer does, and is not the cause.
        ({1: EXIT_PEER_LOST, 0: -9}, set(), {1: 1.0}, None),
        # The agent killed rank 0.
        ({0: -9, 1: EXIT_FAILED}, {0}, {1: 1.0}, 1),
        # No culprit is known.
        ({0: EXIT_PEER_LOST}, set(), {0: 1.0}, 0),
        # The culprit's sockets are closed, and its exit code is not there yet.
        ({0: EXIT_FAILED}, set(), {0: 2.0, 1: 1.0}, 1),
        ({0: EXIT_PEER_LOST}, set(), {0: 2.0, 1: 1.0}, 1),
        ({0: -9}, set(), {1: 1.0}, None),
        # Rank 3 ended with 0 within its loop.
        ({0: EXIT_PEER_LOST, 3: EXIT_COMPLETE}, set(), {0: 1.0}, None),
    ],
)
def test_the_worker_that_failed_first_is_blamed(codes, killed, files, blamed):
    """None: a worker without an error file, for which the exit code speaks."""
    errors = [WorkerError(rank=n, message=f"{n}", traceback="", time=time) for n, time in files.items()]
    exits = [WorkerExit(rank=n, code=code, open_step=7 if n == 3 else None) for n, code in codes.items()]
    first = first_failure(exits, killed, errors, "its exit code")
    assert first.message == ("its exit code" if blamed is None else f"{blamed}")
