"""Workers are forked from a fork server that holds the code of today, and else spawned.

A fork takes milliseconds. Spawning is never an error, only slower by seconds, and the console shows
why it was necessary. Workers of a script without this library are always spawned: as under
torchrun, its first lines may set what torch reads when it is imported.

`ForkServerClient` is the agent's end of the connection to the fork server (worker/fork_server.py).
Each request for a worker ends in a forked process, whose exit code is reported, or in a reason. The
server dies with the agent, and its workers die with it.
"""

import os
import signal
import site
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

import elastic
from elastic.agent.worker_process import Process, ProcessStart, SpawnedProcess
from elastic.errors import CannotStart
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
from elastic.system.untrusted import decode, encode, parse_number

READY_LIMIT_S = 300.0
FORK_LIMIT_S = 30.0
ASK_EVERY_S = 0.1  # whether a wait is interrupted: no signal ends it
_OUTPUT_TAIL_BYTES = 2000
_CLOCK = SystemClock()
_Code = frozenset[tuple[str, int]]


def _never() -> bool:
    return False


class CannotFork(Exception):  # noqa: N818 - a reason to spawn, not an error
    """No worker can be forked; the message is for people."""


class Spawner:
    """Starts the processes that run the recipe on this node; `close` ends the forked ones."""

    def __init__(self, recipe: Path, report: Callable[[str], None], *, forks: bool = True) -> None:
        """report: prints a line on the console. forks: from a fork server, which is started now and
        imports meanwhile. Raises CannotStart.
        """
        self.report = report
        self.interrupted: Callable[[], bool] = lambda: False  # whether workers are waited for no more
        self._recipe = recipe
        self._reported = ""
        self._is_hopeless = False  # another fork server would fail as well
        self._code = _installed_code_or(frozenset())  # which the fork server holds
        try:
            self._server = ForkServerClient.spawn(recipe) if forks else None
        except OSError as error:
            raise CannotStart(f"no process can be started to fork the workers from ({error})") from error

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def fork_server_pid(self) -> int | None:
        """None while no fork server is alive."""
        return self._server.pid if self._server is not None and self._server.exit_code is None else None

    def count_gpus(self) -> int:
        """How many torch finds: the fork server tells it as soon as it has imported torch."""
        if self._server is not None:
            with suppress(CannotFork):  # the first worker that is to be forked reports it
                self._server.wait_ready()
                return self._server.gpus or 0
        words = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return parse_number(found.stdout.strip()) or 0

    def renew(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Call between generations, with no live workers.

        Restarts the fork server if it died or if installed code changed on disk, and waits until it
        is ready, or until `interrupted()`, which is asked again and again: a node that is to leave
        needs no workers.
        """
        if self._server is None:
            return
        code = _installed_code_or(self._code)
        if self._code != code:
            self.report("installed code has changed; the fork server imports it again")
        elif self._server.exit_code is None or self._is_hopeless:
            return
        else:
            self.report("the fork server died; another one is started")
        self._server.close()
        self._is_hopeless = False
        self._code = code
        try:
            self._server = ForkServerClient.spawn(self._recipe)
        except OSError as error:
            # No memory or no process left, which may pass: the next generation tries again.
            self.report(f"no process can be started to fork the workers from ({error})")
            return
        try:
            self._server.wait_ready(interrupted)
        except CannotFork as reason:
            self._report_spawning(str(reason))

    def fork_no_more(self, reason: str) -> None:
        """Spawn all workers from now on: those of this recipe cannot inherit what was imported."""
        self.close()
        self._server = None
        self._report_spawning(reason)

    def start(self, start: ProcessStart) -> Process:
        """Raises CannotStart."""
        if self._server is not None and not self._is_hopeless:
            try:
                return self._server.fork(start, self.interrupted)
            except CannotFork as reason:
                self._report_spawning(str(reason))
        return SpawnedProcess(start)

    def _report_spawning(self, reason: str) -> None:
        if self._server is not None and not self._server.is_ready:
            # One that failed by itself while it imported would fail again. One that was killed, for
            # instance for want of memory, may succeed at the next attempt.
            self._is_hopeless = self._server.exit_code != -signal.SIGKILL
        if reason != self._reported:
            self._reported = reason
            self.report(
                f"workers are spawned, which takes seconds, and not forked from the fork server: {reason}"
            )


def _installed_code_or(known: _Code) -> _Code:
    """What is `known` where a folder cannot be listed now, perhaps while a package is replaced."""
    with suppress(OSError):
        return installed_code()
    return known


def installed_code() -> _Code:
    """Names of installed packages, and this library's files with modification times in ns.

    Equal values mean that a new interpreter would import what the fork server holds in memory.

    Of installed packages only records of installation count with their times: a package that is
    replaced by another version leaves a new dist-info folder behind, while the time of the
    package's own folder also changes whenever Python caches byte code in it. Raises OSError.
    """
    found = set()
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        for path in Path(folder).glob("*"):  # none where there is no such folder
            is_record = path.suffix in (".dist-info", ".egg-info", ".egg-link", ".pth")
            if path.name != "__pycache__":
                found.add((str(path), _changed_ns(path) if is_record else 0))
    for package in elastic.__path__:
        found |= {(str(path), _changed_ns(path)) for path in Path(package).rglob("*.py")}
    return frozenset(found)


def _changed_ns(path: Path) -> int:
    with suppress(FileNotFoundError):  # an installation is under way
        return path.stat().st_mtime_ns
    return 0


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
