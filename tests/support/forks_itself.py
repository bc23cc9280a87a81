"""An agent of the tests forks its fork server from itself, where it has one thread.

The tests fork their agents from a process that has imported torch. To import it anew in each
agent's fork server would take seconds in each test. test_fork_server.py spawns real ones.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from elastic.agent import worker_process
from elastic.system import stop_signals
from elastic.system.processes import die_with_parent, thread_count
from elastic.worker import fork_server
from elastic.worker.main import unbuffered


class Fork:
    """A child, with the methods of subprocess.Popen that a Spawner calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_or_spawn(
    theirs: Connection, output: IO[bytes], spawn: Callable[..., Any] = worker_process.spawn_server
) -> Any:
    if thread_count() > 1:
        return spawn(theirs, output)
    agent = os.getpid()
    if pid := os.fork():
        return Fork(pid)
    try:
        die_with_parent(agent)
        os.setsid()
        for number in stop_signals.ALL:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(output.fileno(), descriptor)
            stream = unbuffered(descriptor, getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        fork_server.ForkServer(theirs).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def patch() -> None:
    worker_process.spawn_server = fork_or_spawn
