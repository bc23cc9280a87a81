"""Workers are forked in milliseconds from a warm parent whose code is what a new process would import now; where that cannot be, they start cold.

Cold is never an error, only slower, and is said with its reason. The warm parent dies with this process, and its workers die with it.
"""

import gc
import importlib
import os
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Protocol, Self

import elastic
from elastic.agent.child import Child, Start, start_cold
from elastic.checkpoint.wire import Lines, to_line
from elastic.clock import SystemClock
from elastic.threads import threads

READY_LIMIT_S = 300.0
FORK_LIMIT_S = 30.0
_RECEIVE_BYTES = 64 * 1024
_LAST_WORDS_BYTES = 2000
_CLOCK = SystemClock()
_SIGKILLED = -9

GoOn = Callable[[Path, socket.socket, int, IO[bytes]], NoReturn]


class NotWarm(Exception):  # noqa: N818 - a reason to start cold, not an error
    """Raised where nothing can be forked; the reason is for people."""


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Forked:
    """A child that this process forked itself."""

    pid: int

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return _SIGKILLED


class WarmParent:
    """The process `elastic.train.warm`; its docstring has what is said over the socket."""

    def __init__(self, process: Process, connection: socket.socket, printed: IO[bytes]) -> None:
        self._process = process
        self._connection = connection
        self._printed = printed
        self._lines = Lines()
        self._ended: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        self._is_ready = False
        self.is_alive = True
        self.ended_by: int | None = None  # exit code, or minus the signal's number

    @staticmethod
    def start(recipe: Path) -> "WarmParent":
        """Returns at once; it begins to import."""

        def begin(connection: socket.socket, printed: IO[bytes]) -> Process:
            words = ["elastic.train.warm", str(recipe), str(connection.fileno()), str(os.getpid())]
            return subprocess.Popen(
                [sys.executable, "-u", "-m", *words],
                pass_fds=[connection.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        return WarmParent._begin(begin, *socket.socketpair())

    @staticmethod
    def split_off(recipe: Path, go_on: GoOn) -> "WarmParent":
        """As `start`, for a process that needs torch itself: it is imported here, for both, and the rest only in the fork. go_on: what the fork does."""
        gc.disable()  # as the warm parent does while it imports
        importlib.import_module("torch")
        gc.enable()
        if threads() > 1:
            return WarmParent.start(recipe)
        agent_pid = os.getpid()
        ours, theirs = socket.socketpair()

        def begin(connection: socket.socket, printed: IO[bytes]) -> Process:
            pid = os.fork()
            if not pid:
                ours.close()
                go_on(recipe, connection, agent_pid, printed)
            return Forked(pid)

        return WarmParent._begin(begin, ours, theirs)

    @staticmethod
    def _begin(
        begin: Callable[[socket.socket, IO[bytes]], Process], ours: socket.socket, theirs: socket.socket
    ) -> "WarmParent":
        printed = tempfile.TemporaryFile()  # noqa: SIM115 - it is read as long as workers are forked
        # It is born with the signals blocked that it will let pass by, and so never without that protection.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            process = begin(theirs, printed)
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return WarmParent(process, ours, printed)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything, as far as is known."""
        return self._is_ready

    def fork(self, start: Start) -> int:
        """The pid of a worker that runs by now. Raises NotWarm."""
        self.wait_ready()
        self._send(to_line({"fork": start.words, "env": dict(start.env)}), [start.out, start.err])
        answer = self._next_answer(FORK_LIMIT_S)
        if "pid" not in answer:
            raise NotWarm(answer.get("unfit", "its answer makes no sense"))
        return int(answer["pid"])

    def wait_ready(self) -> None:
        """Return once it has imported everything. Raises NotWarm."""
        if not self._is_ready:
            self._is_ready = "ready" in self._next_answer(READY_LIMIT_S)

    def code(self, pid: int) -> int | None:
        """How a worker ended. It dies with its parent, so when that is gone it was killed."""
        self._receive()
        if self.is_alive:
            return self._ended.get(pid)
        return self._ended.setdefault(pid, _SIGKILLED)

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

    def _send(self, line: bytes, descriptors: list[int]) -> None:
        try:
            self._connection.settimeout(FORK_LIMIT_S)
            sent_bytes = socket.send_fds(self._connection, [line], descriptors)
            if sent_bytes < len(line):
                self._connection.sendall(line[sent_bytes:])
        except OSError as error:
            self.kill()
            raise NotWarm(f"it took no request ({error})") from error

    def _next_answer(self, limit_s: float) -> dict[str, Any]:
        """What it says next, ends of workers aside."""
        deadline = _CLOCK.monotonic() + limit_s
        look = select.poll()
        look.register(self._connection, select.POLLIN)
        while True:
            self._receive()
            if self._answers:
                return self._answers.pop(0)
            if not self.is_alive:
                raise NotWarm(f"it ended{self._last_words()}")
            left_s = deadline - _CLOCK.monotonic()
            if left_s <= 0:
                # A late answer would be a worker that nobody watches; it dies with its parent.
                self.kill()
                raise NotWarm(f"it did not answer within {limit_s:.0f} s{self._last_words()}")
            look.poll(left_s * 1000)

    def _receive(self) -> None:
        """Take in what has arrived, without waiting."""
        while self.is_alive:
            self._connection.setblocking(False)
            try:
                data = self._connection.recv(_RECEIVE_BYTES)
                messages = self._lines.feed(data)
            except BlockingIOError:
                return
            except (OSError, ValueError):
                data, messages = b"", []
            for message in messages:
                if "exited" in message:
                    self._ended[int(message["exited"])] = int(message["code"])
                else:
                    self._answers.append(message)
            if not data:
                self.kill()

    def _last_words(self) -> str:
        size_bytes = os.fstat(self._printed.fileno()).st_size
        tail = os.pread(self._printed.fileno(), _LAST_WORDS_BYTES, max(0, size_bytes - _LAST_WORDS_BYTES))
        words = tail.decode(errors="replace").strip()
        return f"; it printed last: {words}" if words else ""


class WarmChild:
    def __init__(self, parent: WarmParent, pid: int) -> None:
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


class Nursery:
    """Starts whatever runs the recipe on this node; leave it, as a context, when nothing that it started is wanted any more."""

    def __init__(
        self,
        recipe: Path,
        say: Callable[[str], None],
        first: Callable[[Path], WarmParent] = WarmParent.start,
    ) -> None:
        """first: how the first warm parent comes about."""
        self.say = say
        self._recipe = recipe
        self._said = ""
        self._parent: WarmParent | None = None
        self._code: frozenset[tuple[str, int]] = frozenset()
        self._is_hopeless = sys.platform != "linux"
        self._begin(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    @property
    def warm_pid(self) -> int | None:
        """Of the warm parent; None where there is none."""
        return self._parent.pid if self._parent is not None and self._parent.is_alive else None

    def renew(self) -> None:
        """Before the others are met, when no worker lives: begin anew where the warm parent died, or holds code that has changed on the disk, and wait until it is ready."""
        if self._parent is None:
            return
        has_changed = self._code != installed_code()
        if has_changed:
            self.say("installed code has changed; the warm parent imports it anew")
        elif self._parent.is_alive or self._is_hopeless:
            return
        else:
            self.say("the warm parent died; another one is started")
        self._parent.close()
        self._is_hopeless = False
        self._begin()
        try:
            self._parent.wait_ready()
        except NotWarm as reason:
            self._go_cold(str(reason))

    def start(self, start: Start) -> Child:
        if self._parent is not None and not self._is_hopeless:
            try:
                pid = self._parent.fork(start)
            except NotWarm as reason:
                self._go_cold(str(reason))
            else:
                return WarmChild(self._parent, pid)
        return start_cold(start)

    def _begin(self, how: Callable[[Path], WarmParent] = WarmParent.start) -> None:
        if not self._is_hopeless:
            self._code = installed_code()
            self._parent = how(self._recipe)

    def _go_cold(self, reason: str) -> None:
        if self._parent is not None and not self._parent.is_ready:
            # One that ended by itself before it was ready would end again; after one that was killed, for want of memory say, another is tried.
            self._is_hopeless = self._parent.ended_by != _SIGKILLED
        if reason != self._said:
            self._said = reason
            self.say(f"workers are not forked from the warm parent but started one by one: {reason}")


def installed_code() -> frozenset[tuple[str, int]]:
    """What a warm parent holds frozen: the names of what is installed and this library's own files, with times of change.

    A package that is replaced by another version leaves a new dist-info folder behind; other folders' times change when byte code is cached.
    """
    found = set()
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        if not Path(folder).is_dir():
            continue
        for entry in os.scandir(folder):
            is_record = entry.name.endswith((".dist-info", ".egg-info", ".egg-link", ".pth"))
            if entry.name != "__pycache__":
                found.add((entry.path, entry.stat().st_mtime_ns if is_record else 0))
    for package in elastic.__path__:
        found |= {(str(path), path.stat().st_mtime_ns) for path in Path(package).rglob("*.py")}
    return frozenset(found)
