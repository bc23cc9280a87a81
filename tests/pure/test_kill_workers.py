"""An agent that kills its workers does not wait for a fork server that will never report them."""

from types import SimpleNamespace

from elastic.agent.workers import KILL_WAIT_S, NodeWorkers
from elastic.testing.fakes import FakeClock


def test_a_fork_server_that_reports_no_exit_is_killed():
    """It is stopped, or hangs. A node that leaves has less time for it."""
    for within_s in (KILL_WAIT_S, 2.0):
        clock, killed_s, said = FakeClock(), [], []
        process = SimpleNamespace(
            pid=7,
            poll=lambda killed_s=killed_s: -9 if killed_s else None,
            kill=lambda: None,
            server=SimpleNamespace(kill=lambda clock=clock, killed_s=killed_s: killed_s.append(clock.now)),
        )
        page = SimpleNamespace(open_step=lambda _rank: None)
        log, console = SimpleNamespace(record=said.append), SimpleNamespace(print_line=said.append)
        settings = SimpleNamespace(imports_library=True)
        workers = NodeWorkers(
            [], SimpleNamespace(page=page, log=log, console=console, clock=clock, settings=settings)
        )
        workers._starts = {0: SimpleNamespace(rank=0, local_rank=0)}
        workers._processes, workers.wait = {0: process}, clock.sleep
        began_s = clock.now
        workers.kill(None, within_s=within_s)
        assert within_s <= killed_s[0] - began_s <= within_s + 0.2
