"""The agent sleeps until a process may have exited, and learns each exit code.

A process that runs the recipe is a child of the fork server, whether that forked it or began it as
a new interpreter (worker/fork_server.py). `ForkServerClient` is the agent's end of the connection.
Each request ends in a process, whose exit code is reported, or in a reason. The server dies with
the agent, and its processes die with it.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe  # noqa: TID251 - bytes alone, between an agent and its child
from multiprocessing.reduction import send_handle  # noqa: TID251 - bytes alone, between an agent and its child
from pathlib import Path
from typing import IO

from elastic.errors import CannotStart
from elastic.system import stop_signals
from elastic.system.clock import SystemClock
from elastic.system.fork_protocol import Exited, FromServer, Ready, Refused, Started, StartRequest
from elastic.system.processes import start_ticks
from elastic.system.untrusted import decode, encode, parse_number

READY_LIMIT_S = 300.0
FORK_LIMIT_S = 30.0
ASK_EVERY_S = 0.1  # whether a wait is interrupted: no signal ends it
_OUTPUT_TAIL_BYTES = 2000
_CLOCK = SystemClock()


def never() -> bool:
    return False


class ServerGone(CannotStart):
    """The fork server has ended, or was ended because it did not answer."""


class ForkServerClient:
    """Connection to one fork server, which it also starts and ends."""

    def __init__(self, start: Callable[[Connection, IO[bytes]], subprocess.Popen[bytes]]) -> None:
        """`start` is given the server's end of the connection, and a file for the output."""
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it is read for as long as workers are started
        self._exit_codes: dict[int, int] = {}  # of workers, by pid
        self._answers: deque[Ready | Started | Refused] = deque()
        self.is_ready = False  # it has imported everything, and was seen to have
        self.gpus: int | None = None  # that torch finds
        # The server's; minus the number of the signal that ended it; None while it lives.
        self.exit_code: int | None = None
        try:
            with stop_signals.blocked():
                self._server = start(theirs, self._output)
        except OSError as error:
            raise CannotStart(f"no process can be started ({error})") from error
        finally:
            theirs.close()

    @staticmethod
    def spawn(recipe: Path | None) -> "ForkServerClient":
        """Start a fork server as a new interpreter. Returns at once, while the server imports.

        recipe: whose imports it imports; None for a server that imports nothing, and spawns.
        """

        def start(theirs: Connection, output: IO[bytes]) -> subprocess.Popen[bytes]:
            words = ["elastic.worker.fork_server", str(recipe or ""), str(theirs.fileno()), str(os.getpid())]
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
    def pid(self) -> int:
        return self._server.pid

    def start(
        self, request: StartRequest, descriptors: Sequence[int], interrupted: Callable[[], bool] = never
    ) -> "Process":
        """A process that runs by now. Raises CannotStart; ServerGone also when `interrupted()`.

        descriptors: as in StartRequest; they stay open here.
        """
        self.wait_ready(interrupted)
        try:
            self._connection.send_bytes(json.dumps(encode(request)).encode())
            for descriptor in descriptors:
                send_handle(self._connection, descriptor, self.pid)
        except OSError as error:
            self.kill()
            raise ServerGone(f"it took no request ({error})") from error
        # A server that was not ready in time would answer the wait for that first.
        answer = self._answer(FORK_LIMIT_S, interrupted) if self.is_ready else None
        if isinstance(answer, Refused):
            raise CannotStart(answer.reason)
        if answer is None:
            self.kill()  # a late answer would mean a worker that no agent watches
            raise ServerGone("it did not answer before this node had to leave")
        assert isinstance(answer, Started)
        return Process(self, answer.pid, start_ticks(answer.pid), answer.spawned)

    def wait_ready(self, interrupted: Callable[[], bool] = never) -> None:
        """Return once the server has imported everything. Raises ServerGone.

        Returns earlier when `interrupted()`; the server then imports on, and `is_ready` is false.
        """
        if not self.is_ready and (hello := self._answer(READY_LIMIT_S, interrupted)) is not None:
            assert isinstance(hello, Ready)
            self.is_ready, self.gpus = True, hello.gpus

    def exit_code_of(self, pid: int) -> int | None:
        """The exit code of a worker; None while it runs.

        Workers die with the server, so all of them have exited once the server has.
        """
        self._receive()
        return self._exit_codes.get(pid, None if self.exit_code is None else -signal.SIGKILL)

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

    def _answer(self, limit_s: float, interrupted: Callable[[], bool]) -> Ready | Started | Refused | None:
        """The server's next one; None when `interrupted()` before.

        Raises ServerGone if the server exits or takes too long.
        """
        deadline = _CLOCK.monotonic() + limit_s
        while True:
            self._receive()
            if self._answers:
                return self._answers.popleft()
            if self.exit_code is not None:
                raise ServerGone(f"it ended{self._output_tail()}")
            if interrupted():
                return None
            left_s = deadline - _CLOCK.monotonic()
            if left_s <= 0:
                # A late answer would mean a worker that no agent watches. It dies with the server.
                self.kill()
                raise ServerGone(f"it did not answer within {limit_s:.0f} s{self._output_tail()}")
            self._connection.poll(min(left_s, ASK_EVERY_S))

    def _receive(self) -> None:
        """Take in the messages that have arrived, without waiting."""
        if self.exit_code is not None:
            return
        try:
            while self._connection.poll():
                data = self._connection.recv_bytes()
                message: FromServer = decode(FromServer, data, what="a message of the fork server")
                if isinstance(message, Exited):
                    self._exit_codes[message.pid] = message.code
                    continue
                if isinstance(message, Started):
                    # An earlier worker had the number, which the kernel gives again once that one
                    # is reaped: this worker would seem to have ended as that one did.
                    self._exit_codes.pop(message.pid, None)
                self._answers.append(message)
        except (EOFError, OSError, ValueError):
            self.kill()

    def _output_tail(self) -> str:
        size_bytes = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _OUTPUT_TAIL_BYTES, max(0, size_bytes - _OUTPUT_TAIL_BYTES))
        text = tail.decode(errors="replace").strip()
        return f"; it printed last: {text}" if text else ""


@dataclass(frozen=True, slots=True)
class Process:
    """A child of the fork server that leads a session of its own, which ends with it.

    start_ticks: tell it from a process that gets its number later; None where it has exited.
    spawned: why it was not forked, "" where nothing is imported; None if it was.
    """

    server: ForkServerClient
    pid: int
    start_ticks: int | None
    spawned: str | None

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self.server.exit_code_of(self.pid)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None and self._keeps_number():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """With all that it started, unless that left its session."""
        if self._keeps_number():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # those that it left behind where it has ended
                return
            # Nothing is left, or it was forked so recently that it has not called setsid.
            self.send_signal(signal.SIGKILL)

    def _keeps_number(self) -> bool:
        """Whether no other process has it. While a session lasts, none gets its number."""
        return start_ticks(self.pid) in (self.start_ticks, None)


def wait_any_exit(processes: Collection[Process], timeout_s: float) -> None:
    """Return when one of the processes may have exited, or after `timeout_s`."""
    exits = select.poll()
    for process in processes:  # valid until `poll` has returned a code
        exits.register(process.server.fileno(), select.POLLIN)
    exits.poll(timeout_s * 1000)


class Spawner:
    """Starts the processes that run the recipe on this node; `close` ends them.

    They are forked from a fork server, or spawned where forking is not possible. A fork takes
    milliseconds. Spawning is never an error, only slower by seconds, and the console shows why it
    was necessary. Workers of a script without this library are always spawned: as under torchrun,
    its first lines may set what torch reads when it is imported.

    Installed code is that of the time when the fork server started, and the recipe that of the time
    when a worker starts.
    """

    def __init__(self, recipe: Path, report: Callable[[str], None], *, forks: bool = True) -> None:
        """report: prints a line on the console. forks: from a fork server that imports meanwhile.

        Raises CannotStart.
        """
        self.report = report
        self.interrupted = never  # whether workers are waited for no more
        self._recipe = recipe if forks else None  # None where all are spawned
        self._server = ForkServerClient.spawn(self._recipe)
        self._imports = forks  # the living server; False if it only spawns
        self._said = ""

    def close(self) -> None:
        self._server.close()

    def count_gpus(self) -> int:
        """How many torch finds: the fork server tells it as soon as it has imported torch."""
        if self._imports:
            with suppress(ServerGone):  # the first process that is to be started reports it
                self._server.wait_ready()
                return self._server.gpus or 0
        words = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return parse_number(found.stdout.strip()) or 0

    def renew(self, interrupted: Callable[[], bool] = never) -> None:
        """Call between generations, with no live workers.

        Starts another fork server if this one died or only spawns, and waits until it is ready, or
        until `interrupted()`, which is asked again and again: a node that is to leave needs no
        workers.
        """
        if self._server.exit_code is None and self._imports == (self._recipe is not None):
            return
        self.report("the fork server died; another one is started")
        try:
            self._replace(self._recipe)
            self._server.wait_ready(interrupted)
        except ServerGone as reason:
            self._give_up(str(reason))
        except CannotStart as reason:  # which may pass: the next generation tries again
            self.report(str(reason))

    def fork_no_more(self, reason: str) -> None:
        """Spawn all workers from now on: those of this recipe cannot inherit what was imported.

        Raises CannotStart.
        """
        self._recipe = None
        self._replace(None)
        self._say(reason)

    def start(self, request: StartRequest, *descriptors: int) -> Process:
        """descriptors: as in StartRequest. Raises CannotStart."""
        try:
            process = self._server.start(request, descriptors, self.interrupted)
        except ServerGone as reason:
            self._give_up(str(reason))
            self._replace(None)
            process = self._server.start(request, descriptors)
        if process.spawned:
            self._say(process.spawned)
        return process

    def _give_up(self, reason: str) -> None:
        """One that failed by itself while it imported would fail again. One that was killed, for
        instance for want of memory, may succeed at the next attempt.
        """
        if not self._server.is_ready and self._server.exit_code != -signal.SIGKILL:
            self._recipe = None
        self._say(reason)

    def _replace(self, recipe: Path | None) -> None:
        server = ForkServerClient.spawn(recipe)
        self._server.close()
        self._server, self._imports = server, recipe is not None

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self.report(
                f"workers are spawned, which takes seconds, and not forked from the fork server: {reason}"
            )
