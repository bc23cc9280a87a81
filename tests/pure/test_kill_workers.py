"""An agent that kills its workers does not wait for a fork server that will never report them."""

import os
from types import SimpleNamespace

import pytest

from elastic.agent.workers import KILL_WAIT_S, LAST_REPORT_WAIT_S, REPORT_WAIT_S, NodeWorkers
from elastic.system.processes import has_exited
from elastic.testing.fakes import FakeClock


class Unreported:
    """A worker whose parent does not say that it has exited, until the parent is killed."""

    def __init__(self, pid, clock):
        self.pid, self._clock = pid, clock
        self.parent_killed_s = None
        self.server = SimpleNamespace(kill=self.kill_parent)

    def poll(self):
        return None if self.parent_killed_s is None else -9

    def kill_parent(self):
        self.parent_killed_s = self._clock.monotonic()

    def forget(self):
        pass

    kill_session = forget


def exited_child():
    """A process that has exited, and of which nobody took note."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.fixture
def killed_after():
    """After how many seconds the fork server is killed for a worker with this pid."""

    def measure(pid, *, is_last):
        clock, said = FakeClock(), []
        process = Unreported(pid, clock)
        start = SimpleNamespace(rank=0, local_rank=0, is_plain=False)
        log = SimpleNamespace(record=said.append)
        console = SimpleNamespace(print_line=said.append)
        workers = NodeWorkers([], lambda _start: process, lambda _rank: None, log, console, clock)
        workers._starts, workers._processes = {0: start}, {0: process}
        workers.wait = clock.sleep
        began_s = clock.monotonic()
        workers.kill(None, is_last=is_last)
        return process.parent_killed_s - began_s

    return measure


def test_a_fork_server_that_reports_no_exit_is_killed_soon(killed_after):
    """It is stopped, or hangs: a node that left waited for 30 s, beyond its grace."""
    pid = exited_child()
    try:
        assert has_exited(pid)
        assert killed_after(pid, is_last=True) == LAST_REPORT_WAIT_S
        assert killed_after(pid, is_last=False) == REPORT_WAIT_S
    finally:
        os.waitpid(pid, 0)


def test_a_worker_that_does_not_exit_though_killed_has_longer(killed_after):
    """A device or a file system hangs."""
    assert not has_exited(os.getpid())
    assert killed_after(os.getpid(), is_last=True) == KILL_WAIT_S
