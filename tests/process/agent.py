"""`elastic-train` for tests, which fork their agents from a fork server that has imported torch.

It has imported the driver of object stores as well: otherwise every process of a run in one takes
half a second for it.

Its own fork server is a fork of it, where it has one thread: to import torch anew takes seconds in
each test. tests/process/test_fork_server.py has those that are spawned.

DRILL_NAMESPACES, the pid of a process, puts the agent into the user and mount namespaces of that
one. DRILL_SCRIPT, a path, is run instead of the command.
"""

import ctypes
import functools
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import botocore.session
import s3fs  # noqa: F401
import torch.distributed.run  # noqa: F401

import elastic.agent.launch  # noqa: F401 - what the command would import
from elastic import cli
from elastic.agent.fork_server_client import ForkServerClient
from elastic.system.processes import die_with_parent, thread_count
from elastic.worker import fork_server
from elastic.worker.main import unbuffered

# As in tests/conftest.py: else each client of a store parses the same descriptions of all services.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
SIGKILL = 9


def enter(pid: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("user", "mnt"):
        there = Path(f"/proc/{pid}/ns/{name}")
        if there.readlink() != Path(f"/proc/self/ns/{name}").readlink():
            with there.open() as namespace:
                assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    # The new capabilities reset both: the agent would survive its parent, and workers could not
    # open its memory through /proc.
    assert libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


class Fork:
    """A child, with the methods of subprocess.Popen that a ForkServerClient calls."""

    def __init__(self, pid):
        self.pid = pid

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def forks_itself(recipe, spawn=ForkServerClient.spawn):
    """In the place of `ForkServerClient.spawn`."""
    if thread_count() > 1:
        return spawn(recipe)
    agent = os.getpid()

    def start(theirs, output):
        pid = os.fork()
        if pid:
            return Fork(pid)
        try:
            die_with_parent(agent)
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            with Path(os.devnull).open() as nothing:
                os.dup2(nothing.fileno(), 0)
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                os.dup2(output.fileno(), descriptor)
                stream = unbuffered(descriptor, getattr(sys, name))
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
            fork_server.import_and_serve(recipe, theirs.detach())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    return ForkServerClient(start)


if __name__ == "__main__":
    ForkServerClient.spawn = staticmethod(forks_itself)
    if namespaces := os.environ.pop("DRILL_NAMESPACES", None):
        enter(namespaces)
    os.chdir(os.environ["DRILL_FOLDER"])
    if script := os.environ.pop("DRILL_SCRIPT", None):
        sys.argv[0] = script
        runpy.run_path(script, run_name="__main__")
    else:
        cli.command()
