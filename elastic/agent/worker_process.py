"""The agent sleeps until a process may have exited, and learns each exit code.

`Process` is all that the agent needs to know of a process that runs the recipe. This module has the
processes that the agent spawns: they import everything themselves, which takes seconds. Those that
the fork server forks are in spawner.py.
"""

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from elastic.config import environment
from elastic.errors import CannotStart
from elastic.system import stop_signals
from elastic.system.processes import exit_code_of_child


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStart:
    """One process to start. Its descriptors stay open in the caller."""

    command: tuple[str, ...]  # the recipe and its arguments
    env: Mapping[str, str]  # the whole environment
    stdout: int
    stderr: int
    store_fd: int | None = None  # the listening socket of the generation's store, if it serves that

    @property
    def fds(self) -> list[int]:
        return [self.stdout, self.stderr, *([] if self.store_fd is None else [self.store_fd])]


class Process(Protocol):
    """A process that leads a session of its own."""

    @property
    def pid(self) -> int: ...

    @property
    def keeps_number(self) -> bool:
        """False where another process has its number, as after the death of its parent."""

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs.

        The process keeps its number until `forget`, unless its parent dies.
        """

    def exit_fd(self) -> int:
        """Readable once the process may have exited; valid until `poll` has returned a code."""

    def forget(self) -> None:
        """No signal follows: once it has exited, its number may be given to another process."""

    def kill_parent(self) -> None:
        """End the parent of a process that does not exit though killed, so that `poll` answers."""


class SpawnedProcess(subprocess.Popen[bytes]):
    """A child of the agent that begins as a new interpreter and runs the recipe.

    Raises CannotStart.
    """

    def __init__(self, start: ProcessStart) -> None:
        try:
            with stop_signals.blocked(stop_signals.WARNINGS):
                super().__init__(
                    [sys.executable, "-P", "-u", "-m", "elastic.worker.main", *start.command],
                    env={**start.env, **environment.store_variable(start.store_fd)},
                    pass_fds=start.fds[2:],
                    stdin=subprocess.DEVNULL,
                    stdout=start.stdout,
                    stderr=start.stderr,
                    start_new_session=True,
                )
        except OSError as error:
            raise CannotStart(f"no process can be started ({error})") from error
        try:
            self._exit = io.FileIO(os.pidfd_open(self.pid))  # Linux 5.3
        except OSError as error:
            self.kill()
            self.wait()
            raise CannotStart(f"a process that was started cannot be watched ({error})") from error
        self._code: int | None = None

    @property
    def keeps_number(self) -> bool:
        return True

    def poll(self) -> int | None:
        if self._code is None:
            self._code = exit_code_of_child(self.pid)
            if self._code is not None:
                self._exit.close()
        return self._code

    def forget(self) -> None:
        super().poll()

    def exit_fd(self) -> int:
        return self._exit.fileno()

    def kill_parent(self) -> None:
        """The parent is this agent: there is nothing left to try. Raises TimeoutError."""
        raise TimeoutError(
            f"expected process {self.pid} to end when it was killed, found it alive; its device or file system hangs"
        )


def wait_any_exit(processes: Collection[Process], timeout_s: float) -> None:
    """Return when one of the processes may have exited, or after `timeout_s`."""
    exits = select.poll()
    for process in processes:
        exits.register(process.exit_fd(), select.POLLIN)
    exits.poll(timeout_s * 1000)


def kill_session(process: Process) -> None:
    """SIGKILL to the process and to all that it started, unless they left its process group.

    Not after `forget`: the number may be another's by then.
    """
    # Data-loading processes may outlive the leader, so the group is killed whether or not the
    # leader still runs. Until all of them are reaped, the kernel gives its number to no other
    # process.
    if not process.keeps_number:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        return
    # There is no such group. Either everything has exited, or the process was forked so recently
    # that it has not called setsid yet.
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
