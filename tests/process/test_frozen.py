"""A node that is frozen in the middle of a write wakes up later and spoils nothing."""

import os
import signal

import pytest

from elastic.system.processes import is_stopped

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_a_rank_0_that_is_frozen_as_it_begins_the_metrics_spoils_none_when_it_wakes_up(drill, undisturbed):
    """SIGSTOP to rank 0 and its agent, in front of the rename. The other node goes on alone; then
    the worker alone wakes up and renames, and later its agent, which joins again.
    """
    drill.shut(9, 14)
    agents = drill.start_two("--max-restarts", "0", env={"TINY_FREEZE": str(drill.gates)})
    (mark,) = drill.waits_for(lambda: list(drill.gates.glob("frozen-pid*")), "a frozen rank 0")
    frozen = next(agent for agent in agents if mark.name == f"frozen-pid{agent.pid}")
    pid = drill.pid_of_rank(0, generation=1)
    drill.waits_for(lambda: is_stopped(pid) and is_stopped(frozen.pid), "both are stopped")
    drill.stands(9, ranks=1)
    os.kill(pid, signal.SIGCONT)
    drill.waits_for((drill.gates / "woken").exists, "the rename")
    drill.open(9)
    drill.stands(14, ranks=1)
    frozen.signal(signal.SIGCONT)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(14)
    for agent in agents:
        agent.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (14, 0)]
