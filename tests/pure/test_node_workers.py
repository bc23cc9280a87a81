"""The worker that failed first is blamed, and no fork server that reports no exit is waited for."""

from types import SimpleNamespace

import pytest

from elastic.agent.decide import WorkerExit
from elastic.agent.workers import KILL_WAIT_S, NodeWorkers, first_failure
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST
from elastic.system.worker_protocol import WorkerError
from elastic.testing.fakes import FakeClock


@pytest.mark.parametrize("within_s", [KILL_WAIT_S, 2.0])
def test_a_fork_server_that_reports_no_exit_is_killed(within_s):
    """It is stopped, or hangs. A node that leaves has less time for it."""
    clock, killed_s, said = FakeClock(), [], []
    process = SimpleNamespace(pid=7, poll=lambda: -9 if killed_s else None, kill=lambda: None)
    parts = SimpleNamespace(
        spawner=SimpleNamespace(kill=lambda: killed_s.append(clock.now)),
        page=SimpleNamespace(open_step=lambda _rank: None),
        log=SimpleNamespace(record=said.append),
        console=SimpleNamespace(print_line=said.append),
        settings=SimpleNamespace(imports_library=True),
        clock=clock,
    )
    workers = NodeWorkers([], parts, None)
    workers._starts = {0: SimpleNamespace(rank=0, local_rank=0)}
    workers._processes, workers.wait = {0: process}, clock.sleep
    began_s = clock.now
    workers.kill(None, within_s=within_s)
    assert within_s <= killed_s[0] - began_s <= within_s + 0.2


def test_an_exit_that_is_known_ends_the_wait():
    """It was read together with the answer to another request: no descriptor becomes readable."""
    workers = NodeWorkers([], SimpleNamespace(), None)
    workers._starts = {0: None}
    workers._processes = {0: SimpleNamespace(poll=lambda: 0)}
    workers.wait(1e9)


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
