"""A machine that has no process left for a while costs restarts, and no traceback."""

import os
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# The command, whose machine has no process left while the file is there.
AGENT = """
import errno, os, subprocess
from pathlib import Path
from elastic import cli

def refused(begin):
    def begins(*words, **options):
        if Path("no-process").exists():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return begin(*words, **options)
    return begins

subprocess.Popen._execute_child, os.fork = refused(subprocess.Popen._execute_child), refused(os.fork)
cli.command()
"""
REFUSED = "the worker of rank 0 was not started: no process can be started ([Errno 11]"


@pytest.fixture
def start(drill, recipes):
    script = drill.folder / "agent.py"
    script.write_text(AGENT)

    def start(*options):
        words = [str(recipes / "tiny.py"), "--run-dir", drill.run.url, "--snapshot-every", "1", *options]
        return drill.start_script(script, *words)

    return start


def loses_its_fork_server(drill):
    """From the gate of step 10 on no process can be started; the snapshot is of step 9."""
    drill.stands(10, ranks=1)
    stat = Path(f"/proc/{drill.pid_of_rank(0, generation=1)}/stat").read_text()
    (drill.folder / "no-process").touch()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


def test_an_agent_that_can_start_no_process_for_a_while_tries_again_and_goes_on(drill, start, undisturbed):
    """The fork server is killed in step 10, and neither another one nor a worker gets a process in
    the two generations that follow.
    """
    drill.shut(10)
    agent = start("--max-restarts", "20")
    loses_its_fork_server(drill)
    drill.happens("worker_failed", generation=3)
    (drill.folder / "no-process").unlink()
    drill.open(10)
    agent.ends_with(0)

    drill.is_like(undisturbed)
    assert REFUSED in drill.events("worker_failed", generation=2)[0]["message"]
    assert "no process can be started (" in agent.output
    assert "Traceback" not in agent.output
    # None of it lies in the state: the newest snapshot is not given up for an older one.
    assert {step for step, _ in drill.values("restored", "step", "source")} == {0, 9}
