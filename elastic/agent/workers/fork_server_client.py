"""The agent's side of a warm parent: it forks what it is asked for and says how that ended, or says why it cannot.

What the process itself does is in worker/fork_server.py, with the words that both sides use. It dies with this process, and its workers die with it.
"""

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from elastic.agent.workers.process import ProcessStart
from elastic.system.clock import SystemClock
from elastic.system.json_lines import JsonLineSocket
from elastic.system.processes import threads

READY_LIMIT_S = 300.0
FORK_LIMIT_S = 30.0
_LAST_WORDS_BYTES = 2000
_CLOCK = SystemClock()
SIGKILLED = -9  # as an exit code

GoOn = Callable[[Path, socket.socket, int, IO[bytes]], NoReturn]


class CannotFork(Exception):  # noqa: N818 - a reason to start cold, not an error
    """Raised where nothing can be forked; the reason is for people."""


class _ServerProcess(Protocol):
    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _ForkedFromAgent:
    """A child that this process forked itself."""

    pid: int

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return SIGKILLED


class ForkServerClient:
    """The process `elastic.worker.fork_server`; its docstring has what is said over the socket."""

    def __init__(self, process: _ServerProcess, connection: socket.socket, printed: IO[bytes]) -> None:
        self._process = process
        self._connection = JsonLineSocket(connection)
        self._printed = printed
        self._ended: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        self._is_ready = False
        self.is_alive = True
        self.ended_by: int | None = None  # exit code, or minus the signal's number

    @staticmethod
    def start(recipe: Path) -> "ForkServerClient":
        """Returns at once; it begins to import."""

        def begin(connection: socket.socket, printed: IO[bytes]) -> _ServerProcess:
            words = ["elastic.worker.fork_server", str(recipe), str(connection.fileno()), str(os.getpid())]
            return subprocess.Popen(
                [sys.executable, "-u", "-m", *words],
                pass_fds=[connection.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        return ForkServerClient._begin(begin, *socket.socketpair())

    @staticmethod
    def split_off(recipe: Path, go_on: GoOn) -> "ForkServerClient":
        """As `start`, for a process that needs torch itself: it is imported here, for both, and the rest only in the fork. go_on: what the fork does."""
        gc.disable()  # as the warm parent does while it imports
        importlib.import_module("torch")
        gc.enable()
        if threads() > 1:
            return ForkServerClient.start(recipe)
        agent_pid = os.getpid()
        ours, theirs = socket.socketpair()

        def begin(connection: socket.socket, printed: IO[bytes]) -> _ServerProcess:
            pid = os.fork()
            if not pid:
                ours.close()
                go_on(recipe, connection, agent_pid, printed)
            return _ForkedFromAgent(pid)

        return ForkServerClient._begin(begin, ours, theirs)

    @staticmethod
    def _begin(
        begin: Callable[[socket.socket, IO[bytes]], _ServerProcess],
        ours: socket.socket,
        theirs: socket.socket,
    ) -> "ForkServerClient":
        printed = tempfile.TemporaryFile()  # noqa: SIM115 - it is read as long as workers are forked
        # It is born with the signals blocked that it will let pass by, and so never without that protection.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            process = begin(theirs, printed)
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return ForkServerClient(process, ours, printed)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything, as far as is known."""
        return self._is_ready

    def fork(self, start: ProcessStart) -> int:
        """The pid of a worker that runs by now. Raises CannotFork."""
        self.wait_ready()
        self._send({"fork": start.words, "env": dict(start.env)}, [start.out, start.err])
        answer = self._next_answer(FORK_LIMIT_S)
        if "pid" not in answer:
            raise CannotFork(answer.get("unfit", "its answer makes no sense"))
        return int(answer["pid"])

    def wait_ready(self) -> None:
        """Return once it has imported everything. Raises CannotFork."""
        if not self._is_ready:
            self._is_ready = "ready" in self._next_answer(READY_LIMIT_S)

    def code(self, pid: int) -> int | None:
        """How a worker ended. It dies with its parent, so when that is gone it was killed."""
        self._receive()
        if self.is_alive:
            return self._ended.get(pid)
        return self._ended.setdefault(pid, SIGKILLED)

    def fileno(self) -> int:
        return self._connection.fileno()

    def kill(self) -> None:
        """End it, and with it its workers."""
        self.is_alive = False
        self._process.kill()
        self.ended_by = self._process.wait()

    def close(self) -> None:
        self.kill()
        self._connection.close()
        self._printed.close()

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        try:
            self._connection.send(message, descriptors, timeout_s=FORK_LIMIT_S)
        except OSError as error:
            self.kill()
            raise CannotFork(f"it took no request ({error})") from error

    def _next_answer(self, limit_s: float) -> dict[str, Any]:
        """What it says next, ends of workers aside."""
        deadline = _CLOCK.monotonic() + limit_s
        while True:
            self._receive()
            if self._answers:
                return self._answers.pop(0)
            if not self.is_alive:
                raise CannotFork(f"it ended{self._last_words()}")
            left_s = deadline - _CLOCK.monotonic()
            if left_s <= 0:
                # A late answer would be a worker that nobody watches; it dies with its parent.
                self.kill()
                raise CannotFork(f"it did not answer within {limit_s:.0f} s{self._last_words()}")
            self._connection.wait(left_s)

    def _receive(self) -> None:
        """Take in what has arrived, without waiting."""
        if not self.is_alive:
            return
        try:
            for message in self._connection.receive():
                if "exited" in message:
                    self._ended[int(message["exited"])] = int(message["code"])
                else:
                    self._answers.append(message)
            is_over = self._connection.has_ended
        except (OSError, ValueError):
            is_over = True
        if is_over:
            self.kill()

    def _last_words(self) -> str:
        size_bytes = os.fstat(self._printed.fileno()).st_size
        tail = os.pread(self._printed.fileno(), _LAST_WORDS_BYTES, max(0, size_bytes - _LAST_WORDS_BYTES))
        words = tail.decode(errors="replace").strip()
        return f"; it printed last: {words}" if words else ""


class ForkedProcess:
    def __init__(self, parent: ForkServerClient, pid: int) -> None:
        self._parent = parent
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    def poll(self) -> int | None:
        return self._parent.code(self._pid)

    def news(self) -> int | None:
        return self._parent.fileno()

    def give_up(self) -> None:
        self._parent.kill()
