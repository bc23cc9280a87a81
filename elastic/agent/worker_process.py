"""The agent sleeps until a process may have exited, and learns each exit code.

A process that runs the recipe is a child of the fork server: it goes on with the modules imported
there, or executes a new interpreter (worker/fork_server.py). `Spawner` is the agent's end of the
connection. Each request ends in a process, whose exit code is reported, or in a reason. The server
dies with the agent, and its processes die with it.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe  # noqa: TID251 - bytes alone, between an agent and its child
from multiprocessing.reduction import send_handle  # noqa: TID251 - bytes alone, between an agent and its child
from typing import IO

from elastic.errors import CannotStart
from elastic.system import stop_signals
from elastic.system import worker_protocol as protocol
from elastic.system.clock import SystemClock
from elastic.system.untrusted import decode, encode, parse_number

READY_LIMIT_S = 300.0
FORK_LIMIT_S = 30.0
ASK_EVERY_S = 0.1  # whether a wait is interrupted: no signal ends it
_OUTPUT_TAIL_BYTES = 2000
_CLOCK = SystemClock()


def never() -> bool:
    return False


def spawn_server(theirs: Connection, output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """A fork server as a new interpreter. theirs: its end of the connection. Raises OSError."""
    words = ["elastic.worker.fork_server", str(theirs.fileno()), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", *words],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Spawner:
    """Starts the processes that run the recipe on this node; `close` ends them.

    They are forked from a fork server, or spawned by it where forking is not possible. A fork takes
    milliseconds. Spawning is never an error, only slower by seconds, and the console shows why it
    was necessary. Workers of a script without this library are always spawned: as under torchrun,
    its first lines may set what torch reads when it is imported.

    Installed code is that of the time when the fork server started, and the recipe that of the time
    when a worker starts.
    """

    def __init__(self, report: Callable[[str], None], modules: tuple[str, ...] | None = ()) -> None:
        """report: prints a line on the console. modules: as in `preload`; the fork server imports
        them meanwhile.

        Raises CannotStart.
        """
        self.report = report
        self.interrupted = never  # whether workers are waited for no more
        self._modules = modules
        self._said = ""
        self._pids = set[int]()  # of all that were ever started
        self._asked = deque[list[protocol.Started]]()  # the answers to them come later
        self._begin()

    def _begin(self) -> None:
        """Begin a fork server, which imports meanwhile."""
        # Of processes, by pid; those of a server before died with it.
        self.exit_codes = dict.fromkeys(self._pids, int(-signal.SIGKILL))
        self._answers: deque[protocol.Ready | protocol.Started] = deque()
        for unanswered in self._asked:
            unanswered.append(protocol.Started(pid=None, reason="the fork server died"))
        self._asked.clear()
        self._awaited = 0  # answers to Preload
        self._gpus: int | None = None
        # The server's; minus the number of the signal that ended it; None while it lives.
        self.exit_code: int | None = None
        try:
            self._connection, theirs = Pipe()
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it is read for as long as workers are started
            with theirs, stop_signals.blocked():
                self._server = spawn_server(theirs, self._output)
        except OSError as error:
            raise CannotStart(f"no process can be started ({error})") from error
        self.preload(None if self._modules is None else ())

    def preload(self, modules: tuple[str, ...] | None) -> None:
        """Have the server import these as well, which the recipe imports. Returns at once.
        None: processes can inherit nothing, and are spawned from now on.
        """
        # The whole list: a server that replaces this one imports it too.
        self._modules = None if modules is None else (*(self._modules or ()), *modules)
        self._awaited += 1
        with suppress(CannotStart):  # the wait for the answer says so
            self._send(protocol.Preload(modules=self._modules))

    def wait_ready(self, interrupted: Callable[[], bool] = never) -> None:
        """Return once the server has imported everything, or when `interrupted()`.

        If it ends while it imports, the next one imports nothing and spawns all workers.
        Raises CannotStart.
        """
        while self._awaited:
            try:
                answer = self._answer(READY_LIMIT_S, interrupted)
            except CannotStart as reason:
                if self._modules is None:
                    raise
                self.close()
                self._modules = None
                self._begin()
                self.say_why(str(reason))
                continue
            if answer is None:
                return
            assert isinstance(answer, protocol.Ready)
            self._awaited, self._gpus = self._awaited - 1, answer.gpus

    def count_gpus(self) -> int:
        """How many torch finds: the fork server tells it as soon as it has imported torch."""
        self.wait_ready()
        if self._gpus is not None:
            return self._gpus
        words = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return parse_number(found.stdout.strip()) or 0

    def renew(self, interrupted: Callable[[], bool] = never) -> None:
        """Call between generations, with no live workers; standbys may live.

        Starts another fork server if this one died, and waits until it is ready, or until
        `interrupted()`, which is asked again and again: a node that is to leave needs no workers.
        """
        try:
            self.receive()
            if self.exit_code is not None:
                self.report("the fork server died; another one is started")
                self.close()
                self._begin()
            self.wait_ready(interrupted)
        except CannotStart as reason:  # which may pass: the next generation tries again
            self.report(str(reason))

    def start(self, request: protocol.StartRequest, *descriptors: int) -> "Process":
        """A process that runs by now. Raises CannotStart, also when `interrupted()`.

        descriptors: as in StartRequest; they stay open here.
        """
        self.wait_ready(self.interrupted)
        self._send(request, *descriptors)
        # While it still imports, its next message is Ready and not the answer to this request.
        answer = None if self._awaited else self._answer(FORK_LIMIT_S, self.interrupted)
        if answer is None:
            self.kill()  # a late answer would mean a worker that no agent watches
            raise CannotStart("the fork server did not answer before this node had to leave")
        assert isinstance(answer, protocol.Started)
        return self.process_of(answer)

    def ask(self, request: protocol.StartRequest, *descriptors: int) -> list[protocol.Started]:
        """As `start`, without waiting: the answer will be in this list."""
        found = list[protocol.Started]()
        self._send(request, *descriptors)
        self._asked.append(found)
        return found

    def process_of(self, answer: protocol.Started) -> "Process":
        """Raises CannotStart."""
        if answer.pid is None:
            raise CannotStart(str(answer.reason))
        if answer.reason:
            self.say_why(answer.reason)
        self._pids.add(answer.pid)
        return Process(self, answer.pid)

    def say_why(self, reason: str) -> None:
        """Say once why processes are spawned."""
        if reason != self._said:
            self._said = reason
            self.report(
                f"workers are spawned, which takes seconds, and not forked from the fork server: {reason}"
            )

    def wait(self, timeout_s: float) -> None:
        """Return when a process may have exited, or after `timeout_s`."""
        messages = select.poll()
        if self.exit_code is None:
            messages.register(self._connection.fileno(), select.POLLIN)
        messages.poll(1000 * timeout_s)

    def kill(self) -> None:
        """End the server, and with it its workers."""
        if self.exit_code is None:  # otherwise its pid may belong to another process by now
            self._server.kill()
            self.exit_code = self._server.wait()

    def close(self) -> None:
        self.kill()
        self._connection.close()
        self._output.close()

    def _send(self, message: protocol.FromAgent, *descriptors: int) -> None:
        try:
            self._connection.send_bytes(json.dumps(encode(message)).encode())
            for descriptor in descriptors:
                send_handle(self._connection, descriptor, self._server.pid)
        except OSError as error:
            self.kill()
            raise CannotStart(f"the fork server took no request ({error})") from error

    def _answer(
        self, limit_s: float, interrupted: Callable[[], bool]
    ) -> protocol.Ready | protocol.Started | None:
        """The server's next one; None when `interrupted()` before.

        Raises CannotStart if the server exits or takes too long.
        """
        deadline = _CLOCK.monotonic() + limit_s
        while True:
            self.receive()
            if self._answers:
                return self._answers.popleft()
            if self.exit_code is not None:
                raise CannotStart(f"the fork server ended{self._output_tail()}")
            if interrupted():
                return None
            left_s = deadline - _CLOCK.monotonic()
            if left_s <= 0:
                # A late answer would mean a worker that no agent watches. It dies with the server.
                self.kill()
                raise CannotStart(
                    f"the fork server did not answer within {limit_s:.0f} s{self._output_tail()}"
                )
            self.wait(min(left_s, ASK_EVERY_S))

    def receive(self) -> None:
        """Take in the messages that have arrived, without waiting."""
        if self.exit_code is not None:
            return
        try:
            while self._connection.poll():
                message: protocol.FromServer = decode(
                    protocol.FromServer, self._connection.recv_bytes(), what="a message of the fork server"
                )
                if isinstance(message, protocol.Exited):
                    self.exit_codes[message.pid] = message.code
                    continue
                if isinstance(message, protocol.Started) and message.pid is not None:
                    # An earlier worker had the number, which the kernel gives again once that one
                    # is reaped: this worker would seem to have ended as that one did.
                    self.exit_codes.pop(message.pid, None)
                if isinstance(message, protocol.Started) and self._asked:
                    self._asked.popleft().append(message)
                else:
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
    """A child of the fork server that leads a session of its own, which ends with it."""

    spawner: Spawner
    pid: int

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs.

        Processes die with the server: all of them have exited, or are about to, once it has.
        """
        self.spawner.receive()
        otherwise = None if self.spawner.exit_code is None else -signal.SIGKILL
        return self.spawner.exit_codes.get(self.pid, otherwise)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, with all that it started, unless that left its session."""
        self.poll()
        # Once its exit was reported nothing is left of it, and another process may have its number.
        if self.pid not in self.spawner.exit_codes:
            # os.kill: it may have been forked so recently that it has not called setsid.
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
