"""`elastic-train` for tests, which fork their agents from a fork server that has imported torch.

It has imported the driver of object stores as well: otherwise every process of a run in one takes
half a second for it. An agent forks its own fork server from itself, where it has one thread: to
import torch anew there would take seconds in each test. test_fork_server.py spawns real ones. The
commands of `elastic-train check` are forked likewise.

DRILL_NAMESPACES, the pid of a process, puts the agent into the user and mount namespaces of that
one. DRILL_SCRIPT, a path, is run instead of the command. DRILL_RUNS, a path of a script, is run
before all else.
"""

import ctypes
import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import botocore.session
import s3fs  # noqa: F401
import torch.distributed.run  # noqa: F401

import elastic.agent.launch  # noqa: F401 - what the command would import
from elastic import cli
from elastic.agent import worker_process
from elastic.check import runs
from elastic.config import environment
from elastic.system import stop_signals
from elastic.system.processes import die_with_parent, thread_count
from elastic.worker import fork_server
from elastic.worker.main import unbuffered

# As in tests/conftest.py: else each client of a store parses the same descriptions of all services.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
spawn_server = worker_process.spawn_server


class Fork:
    """A child, with the methods of subprocess.Popen that a Spawner calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_or_spawn(theirs: Connection, output: IO[bytes]) -> Any:
    if thread_count() > 1:
        return spawn_server(theirs, output)
    return Fork(forked(output, lambda: fork_server.ForkServer(theirs).serve()))


def run_forked(command: list[str], *, env: dict[str, str], stdout: IO[bytes], **_how: Any) -> Any:
    """As subprocess.run: a command of `elastic-train check`."""

    def run() -> None:
        environment.replace(env)
        tempfile.tempdir = None  # found for the environment of this process before
        sys.argv = command[command.index("elastic.cli") :]
        cli.command()

    return SimpleNamespace(returncode=Fork(forked(stdout, run)).wait())


def forked(output: IO[bytes], run: Callable[[], object]) -> int:
    """The pid of a child that runs it in a session of its own, and dies with this process."""
    parent = os.getpid()
    with stop_signals.blocked():  # an exception of a handler is ignored while hooks of a fork run
        pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
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
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def enter(pid: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("user", "mnt"):
        there = Path(f"/proc/{pid}/ns/{name}")
        if there.readlink() != Path(f"/proc/self/ns/{name}").readlink():
            with there.open() as namespace:
                assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    # The new capabilities reset both: the agent would survive its parent, and workers could not
    # open its memory through /proc.
    assert libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


if __name__ == "__main__":
    worker_process.spawn_server = fork_or_spawn
    runs.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        run=run_forked, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    if first := os.environ.get("DRILL_RUNS"):
        runpy.run_path(first)
    if namespaces := os.environ.pop("DRILL_NAMESPACES", None):
        enter(namespaces)
    os.chdir(os.environ["DRILL_FOLDER"])
    if script := os.environ.pop("DRILL_SCRIPT", None):
        sys.argv[0] = script
        runpy.run_path(script, run_name="__main__")
    else:
        cli.command()
