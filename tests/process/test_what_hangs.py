"""Whatever hangs: SIGTERM is honoured in time, and the run goes on to the same bits."""

import os
import signal
import time
from contextlib import suppress

import pytest

GRACE_S, OVER_S = 4.0, 60.0  # over is 5.0 on a quiet machine (test_leave_deadline.py); a hang lasts for ever
MIDDLE = 6


@pytest.mark.parametrize("what", ["agent", "fork server", "uploader", "collective", "etcd"])
def test_sigterm_is_honoured_whatever_hangs(drill, undisturbed, own_etcd, what):
    """In a step, for the fork server in the rendezvous, and for uploader and etcd once the node
    drains. It has left at most five seconds after its grace, with an exit code that is true, and
    the same command goes on to the digest of a run in which nothing hung.
    """
    options = ["--grace", f"{GRACE_S:g}", "--max-nodes", "3"]
    if what == "etcd":
        servers = own_etcd()
        options += ["--rdzv-backend", "etcd", "--rdzv-endpoint", servers.endpoints]
    drill.shut(MIDDLE)
    waiting = ["--min-nodes", "3"] if what == "fork server" else []
    ranks = 2 if what == "collective" else 1
    agent = drill.start(*options, *waiting, "--nproc-per-node", str(ranks))
    if waiting:
        drill.waits_for(lambda: drill.uploader_of(agent), "an agent that is about to meet the others")
    else:
        drill.stands(MIDDLE, ranks)
    drains = what in ("uploader", "etcd")
    if drains:
        asked_s = terminate(agent)
        drill.happens("drain_requested")
    stopped = {
        "agent": lambda: agent.pid,
        "fork server": lambda: drill.waits_for(lambda: drill.fork_server_of(agent), "a fork server"),
        "uploader": lambda: drill.uploader_of(agent),
        "collective": lambda: drill.pid_of_rank(1, generation=1),
        "etcd": lambda: servers._processes[0].pid,
    }[what]()
    os.kill(stopped, signal.SIGSTOP)
    if not drains:
        asked_s = terminate(agent)
    drill.open(MIDDLE)
    code = agent.wait()
    took_s = time.monotonic() - asked_s
    assert code in ({75} if waiting else {0, 1, 75}), agent.output
    assert took_s <= GRACE_S + OVER_S, f"{took_s:.1f} s after SIGTERM\n{agent.output}"

    with suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)
    drill.all_are_gone()
    drill.ends_like(undisturbed, drill.start(*options))
    lost = [lost for (lost,) in drill.values("restored", "lost_steps")[-1:]]
    assert code != 75 or not any(lost), "the exit code says that nothing is lost"


def terminate(agent):
    agent.signal(signal.SIGTERM)
    return time.monotonic()
