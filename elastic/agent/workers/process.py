"""A process that runs the recipe can be waited for, and its end is seen once, whoever its parent is.

Here are the contract and the processes that import everything themselves; those that are forked are in fork_server_client.py.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

# Where the kernel cannot say that a process ended, waiting looks this often.
LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStart:
    """One process to start: the recipe and its arguments, its whole environment, and the descriptors that it writes to."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    out: int
    err: int


class Process(Protocol):
    """It leads a session of its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, minus the signal's number where a signal ended it; None while it runs."""

    def news(self) -> int | None:
        """A descriptor that is readable once it may have ended; None where there is no such thing."""

    def give_up(self) -> None:
        """It was killed and does not end: whoever stands between is ended, so that `poll` has an answer."""


class SpawnedProcess:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._end = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._end is not None:
            os.close(self._end)
            self._end = None
        return code

    def news(self) -> int | None:
        return self._end

    def give_up(self) -> None:
        raise TimeoutError(
            f"expected process {self.pid} to end when it was killed, found it alive; its device or file system hangs"
        )


def spawn(start: ProcessStart) -> Process:
    """ProcessStart a process that imports everything itself, which takes seconds."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "elastic.worker.main", *start.words],
        env=dict(start.env),
        stdin=subprocess.DEVNULL,
        stdout=start.out,
        stderr=start.err,
        start_new_session=True,
    )
    return SpawnedProcess(process)


def wait_any_exit(children: Collection[Process], timeout_s: float) -> None:
    """Return when one of them may have ended, or when the time is over."""
    descriptors = [child.news() for child in children]
    look = select.poll()
    for descriptor in descriptors:
        if descriptor is not None:
            look.register(descriptor, select.POLLIN)
    limit_s = min(timeout_s, LOOK_EVERY_S) if None in descriptors else timeout_s
    look.poll(limit_s * 1000)


def kill_session(child: Process) -> None:
    """SIGKILL to it and to every process that it started and that did not leave its session."""
    # The session outlives its leader when data-loading processes are left, so a dead one's is killed as well.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
        return
    # It was forked so recently that it does not lead a session yet.
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
