"""What schedulers and terminals send ahead of an end leads to a drain in every process of a job."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

MEMORY_ALONE = ("--snapshot-every", "1", "--save-every", "1000steps")
# As a shell on a terminal starts it: the terminal's end is a SIGHUP.
ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_warning_drains_and_the_sigterm_after_it_skips_nothing(drill, undisturbed):
    """As Slurm sends them: SIGUSR1 ahead of the limit and then SIGTERM, while the worker stands in
    step 10; later SIGUSR2 twice and then SIGTERM, in step 15. A third request would kill it.
    """
    drill.shut(10, 15)
    for step, warnings in ((10, [signal.SIGUSR1]), (15, [signal.SIGUSR2, signal.SIGUSR2])):
        agent = drill.start(*MEMORY_ALONE)
        drill.stands(step, ranks=1)
        for number in warnings:
            agent.signal(number)
            drill.happens("drain_requested", reason=f"{number.name} asks this node to leave")
        agent.signal(signal.SIGTERM)
        drill.waits_for(lambda agent=agent: not is_pending(agent.pid), "it has taken the signal")
        drill.open(step)
        agent.ends_with(75)
        assert "a second signal" not in agent.output
        assert drill.is_committed(step)
        drill.all_are_gone()
    drill.ends_like(undisturbed, drill.start(*MEMORY_ALONE))
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (10, 0), (15, 0)]


def is_pending(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    (pending,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd"))
    return int(pending, 16) != 0


def test_a_terminal_that_closes_loses_no_step_and_no_exit_code(drill, undisturbed):
    """The command's own terminal, to which it can write nothing any more."""
    drill.shut(10)
    terminal, end = os.openpty()
    words = [sys.executable, "-c", ON_TERMINAL, sys.executable, "-m", "elastic.cli"]
    command = subprocess.Popen(
        [*words, *drill._command(MEMORY_ALONE)],
        cwd=drill.folder,
        env=drill._env(None),
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    os.set_blocking(terminal, False)
    drill.agents.append(OnTerminal(command, terminal))
    drill.stands(10, ranks=1)
    os.close(terminal)
    drill.happens("drain_requested", reason="SIGHUP asks this node to leave")
    drill.open(10)
    assert command.wait(240.0) == 75
    assert drill.is_committed(10)
    drill.all_are_gone()
    drill.ends_like(undisturbed, drill.start(*MEMORY_ALONE))


class OnTerminal:
    """As an agent of the drill."""

    def __init__(self, process, terminal):
        self.process = process
        self._terminal = terminal

    @property
    def output(self):
        try:
            return os.read(self._terminal, 2**16).decode(errors="replace")
        except OSError:
            return ""


@pytest.mark.skipif(shutil.which("nohup") is None, reason="nohup is not here")
def test_a_command_of_nohup_goes_on_when_its_terminal_is_gone(drill, undisturbed):
    drill.shut(10)
    agent = drill.execute(["nohup", sys.executable, "-m", "elastic.cli", *drill._command(MEMORY_ALONE)])
    drill.stands(10, ranks=1)
    for pid in drill.processes_of(agent):
        os.kill(pid, signal.SIGHUP)
    drill.waits_for(lambda: not is_pending(agent.pid), "it has taken the signal")
    drill.open(10)
    agent.ends_with(0)
    assert drill.events("drain_requested") == []
    drill.is_like(undisturbed)
