"""`elastic-train` for tests, which fork their agents from a fork server that has imported torch.

It has imported the driver of object stores as well: otherwise every process of a run in one takes
half a second for it.

Its own fork server is a fork of it (tests/support/forks_itself.py).

DRILL_NAMESPACES, the pid of a process, puts the agent into the user and mount namespaces of that
one. DRILL_SCRIPT, a path, is run instead of the command. DRILL_RUNS, a path of a script, is run
before all else.
"""

import ctypes
import functools
import os
import runpy
import sys
from pathlib import Path

import botocore.session
import s3fs  # noqa: F401
import torch.distributed.run  # noqa: F401

import elastic.agent.launch  # noqa: F401 - what the command would import
from elastic import cli

sys.path.append(str(Path(__file__).parents[1] / "support"))
import forks_itself

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


if __name__ == "__main__":
    forks_itself.patch()
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
