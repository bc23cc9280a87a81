"""Each request for a worker ends in a forked process, whose exit code is reported, or in a reason.

This is the agent's end of the connection; the fork server itself is elastic/worker/fork_server.py.
The server dies with the agent, and its workers die with it.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elastic.agent.worker_process import ProcessStart
from elastic.system import stop_signals
from elastic.system.clock import SystemClock
from elastic.system.fork_protocol import (
    Exited,
    Forget,
    Forked,
    ForkRequest,
    FromServer,
    Ready,
    Refused,
)
from elastic.system.json_lines import JsonLineSocket
from elastic.system.processes import start_ticks
from elastic.system.untrusted import decode, encode

READY_LIMIT_S = 300.0
FORK_LIMIT_S = 30.0
ASK_EVERY_S = 0.1  # whether a wait is interrupted: no signal ends it
_OUTPUT_TAIL_BYTES = 2000
_CLOCK = SystemClock()


def _never() -> bool:
    return False


class CannotFork(Exception):  # noqa: N818 - a reason to spawn, not an error
    """No worker can be forked; the message is for people."""


_StartServer = Callable[[socket.socket, IO[bytes]], subprocess.Popen[bytes]]


class ForkServerClient:
    """Connection to one fork server, which it also starts and ends."""

    def __init__(self, start: _StartServer) -> None:
        """`start` is given the server's end of the connection, and a file for the output."""
        ours, theirs = socket.socketpair()
        self._connection = JsonLineSocket(ours)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it is read for as long as workers are forked
        self._exit_codes: dict[int, int] = {}  # of workers, by pid
        self._answers: deque[Ready | Forked | Refused] = deque()
        self.gpus: int | None = None  # that torch finds; None until the server has imported everything
        # The server's; minus the number of the signal that ended it; None while it lives.
        self.exit_code: int | None = None
        try:
            with stop_signals.blocked():
                self._server = start(theirs, self._output)
        finally:
            theirs.close()

    @staticmethod
    def spawn(recipe: Path) -> "ForkServerClient":
        """Start a fork server as a new interpreter. Returns at once, while the server imports."""

        def start(theirs: socket.socket, output: IO[bytes]) -> subprocess.Popen[bytes]:
            words = ["elastic.worker.fork_server", str(recipe), str(theirs.fileno()), str(os.getpid())]
            return subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        return ForkServerClient(start)

    @property
    def is_ready(self) -> bool:
        """It has imported everything, and was seen to have."""
        return self.gpus is not None

    @property
    def pid(self) -> int:
        return self._server.pid

    def fork(self, start: ProcessStart, interrupted: Callable[[], bool] = _never) -> "ForkedProcess":
        """A worker that runs by now. Raises CannotFork, also when `interrupted()` before."""
        self.wait_ready(interrupted)
        has_store = start.store_fd is not None
        request = ForkRequest(command=start.command, env=dict(start.env), serves_store=has_store)
        try:
            self._connection.send(encode(request), start.fds, timeout_s=FORK_LIMIT_S)
        except OSError as error:
            self.kill()
            raise CannotFork(f"it took no request ({error})") from error
        answer = self._answer(FORK_LIMIT_S, interrupted)
        if isinstance(answer, Refused):
            raise CannotFork(answer.reason)
        if answer is None:
            self.kill()  # a late answer would mean a worker that no agent watches
            raise CannotFork("it did not answer before this node had to leave")
        assert isinstance(answer, Forked)
        return ForkedProcess(self, answer.pid, start_ticks(answer.pid))

    def wait_ready(self, interrupted: Callable[[], bool] = _never) -> None:
        """Return once the server has imported everything. Raises CannotFork.

        Returns earlier when `interrupted()`; the server then imports on, and `is_ready` is false.
        """
        if not self.is_ready:
            hello = self._answer(READY_LIMIT_S, interrupted)
            assert hello is None or isinstance(hello, Ready)
            self.gpus = None if hello is None else hello.gpus

    def exit_code_of(self, pid: int) -> int | None:
        """The exit code of a worker; None while it runs.

        Workers die with the server, so all of them have exited once the server has.
        """
        self._receive()
        return self._exit_codes.get(pid, None if self.exit_code is None else -signal.SIGKILL)

    def forget(self, pid: int) -> None:
        """No signal is sent to this worker any more; it is reaped."""
        if self.exit_code is None:
            with suppress(OSError):  # a server that is gone has left its workers to be reaped
                self._connection.send(encode(Forget(pid=pid)), timeout_s=FORK_LIMIT_S)

    def fileno(self) -> int:
        """Readable when the server has sent something."""
        return self._connection.fileno()

    def kill(self) -> None:
        """End the server, and with it its workers."""
        if self.exit_code is None:  # otherwise its pid may belong to another process by now
            self._server.kill()
            self.exit_code = self._server.wait()

    def close(self) -> None:
        self.kill()
        self._connection.close()
        self._output.close()

    def _answer(self, limit_s: float, interrupted: Callable[[], bool]) -> Ready | Forked | Refused | None:
        """The server's next one; None when `interrupted()` before.

        Raises CannotFork if the server exits or takes too long.
        """
        deadline = _CLOCK.monotonic() + limit_s
        while True:
            self._receive()
            if self._answers:
                return self._answers.popleft()
            if self.exit_code is not None:
                raise CannotFork(f"it ended{self._output_tail()}")
            if interrupted():
                return None
            left_s = deadline - _CLOCK.monotonic()
            if left_s <= 0:
                # A late answer would mean a worker that no agent watches. It dies with the server.
                self.kill()
                raise CannotFork(f"it did not answer within {limit_s:.0f} s{self._output_tail()}")
            self._connection.wait(min(left_s, ASK_EVERY_S))

    def _receive(self) -> None:
        """Take in the messages that have arrived, without waiting."""
        if self.exit_code is not None:
            return
        try:
            for line in self._connection.receive():
                message: FromServer = decode(FromServer, line, what="a message of the fork server")
                match message:
                    case Exited(pid=pid, code=code):
                        self._exit_codes[pid] = code
                    case Forked(pid=pid) as answer:
                        # An earlier worker had the number, which the kernel gives again once that
                        # one is reaped: this worker would seem to have ended as that one did.
                        self._exit_codes.pop(pid, None)
                        self._answers.append(answer)
                    case answer:
                        self._answers.append(answer)
            has_ended = self._connection.has_ended
        except (OSError, ValueError):
            has_ended = True
        if has_ended:
            self.kill()

    def _output_tail(self) -> str:
        size_bytes = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _OUTPUT_TAIL_BYTES, max(0, size_bytes - _OUTPUT_TAIL_BYTES))
        text = tail.decode(errors="replace").strip()
        return f"; it printed last: {text}" if text else ""


@dataclass(frozen=True, slots=True)
class ForkedProcess:
    """A worker whose parent is the fork server."""

    server: ForkServerClient
    pid: int
    start_ticks: int | None

    @property
    def keeps_number(self) -> bool:
        # A dead server's workers die too, and any process may reap them.
        return self.server.exit_code is None or start_ticks(self.pid) in (self.start_ticks, None)

    def poll(self) -> int | None:
        return self.server.exit_code_of(self.pid)

    def forget(self) -> None:
        self.server.forget(self.pid)

    def exit_fd(self) -> int:
        return self.server.fileno()

    def kill_parent(self) -> None:
        self.server.kill()
