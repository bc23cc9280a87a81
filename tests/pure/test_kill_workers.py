"""An agent that kills its workers does not wait for a fork server that will never report them."""

from types import SimpleNamespace

import pytest

from elastic.agent.workers import KILL_WAIT_S, LAST_REPORT_WAIT_S, REPORT_WAIT_S, NodeWorkers
from elastic.testing.fakes import FakeClock


class Unreported:
    """A worker whose parent does not say that it has exited, until the parent is killed."""

    pid = 7

    def __init__(self, has_exited, clock):
        self._has_exited, self._clock = has_exited, clock
        self.parent_killed_s = None
        self.server = SimpleNamespace(kill=self.kill_parent)

    def poll(self):
        return None if self.parent_killed_s is None else -9

    def kill_parent(self):
        self.parent_killed_s = self._clock.monotonic()

    def has_exited(self):
        return self._has_exited

    def kill(self):
        pass


@pytest.fixture
def killed_after():
    """After how many seconds the fork server is killed for such a worker."""

    def measure(*, has_exited, is_last):
        clock, said = FakeClock(), []
        process = Unreported(has_exited, clock)
        start = SimpleNamespace(rank=0, local_rank=0, is_plain=False)
        log = SimpleNamespace(record=said.append)
        console = SimpleNamespace(print_line=said.append)
        page = SimpleNamespace(open_step=lambda _rank: None)
        workers = NodeWorkers([], SimpleNamespace(page=page, log=log, console=console, clock=clock))
        workers._starts, workers._processes = {0: start}, {0: process}
        workers.wait = clock.sleep
        began_s = clock.monotonic()
        workers.kill(None, is_last=is_last)
        return process.parent_killed_s - began_s

    return measure


def test_a_fork_server_that_reports_no_exit_is_killed_soon(killed_after):
    """It is stopped, or hangs: a node that left waited for 30 s, beyond its grace. A worker that
    does not exit though killed has longer: a device or a file system hangs.
    """
    assert killed_after(has_exited=True, is_last=True) == LAST_REPORT_WAIT_S
    assert killed_after(has_exited=True, is_last=False) == REPORT_WAIT_S
    assert killed_after(has_exited=False, is_last=True) == KILL_WAIT_S
