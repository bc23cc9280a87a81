"""A worker goes on as a fork only of a process that has one thread, no GPU and no process group.

The fork server is that process; each agent has one, and runs it as `python -P -u -m
elastic.worker.fork_server DESCRIPTOR AGENT_PID`, where the descriptor is this end of a socket pair.
Messages are in system/worker_protocol.py. Where a worker may not go on with what is imported
here, the fork executes a new interpreter, which imports everything itself; until then it takes no
lock of a library, because other threads may have held it. An agent that asks for no imports has all
workers started so.

What may be in a process that is forked from, and what may not:

- Imported modules may: that is the point. The child shares their memory until one of the two writes
  to it, and starts in milliseconds instead of seconds.
- Other threads may not. The child has a copy of the calling thread alone. A lock that another
  thread held at that moment, in malloc, gloo or OpenMP, stays locked for ever in the child; a pool
  of threads that a library believes to have is not there.
- CUDA may not. Its driver refuses to work in the child of a process that has initialized it, and an
  open device belongs to the parent's context.
- A process group may not. Its sockets would have two owners for one rank.
- The user's own modules may not. Such a module may read RANK, open a file or start a thread when it
  is imported, and it may be edited between two generations. So this process never runs a line of
  them: the preflight says which installed modules they import, and each worker runs them itself.
- Random generators may not stay as imports left them: each child seeds its own (main.py).

Threads, CUDA, process groups and the user's modules are checked before a worker is forked, because
any installed package may bring them in when it is imported. If a check fails, the worker is a new
interpreter, which takes seconds.

The fork server dies with the agent, and its workers die with it. It does not restart itself, and
knows nothing of generations.
"""

import gc
import json
import os
import select
import signal
import sys
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection  # noqa: TID251 - bytes alone, between an agent and its child
from multiprocessing.reduction import recv_handle  # noqa: TID251 - bytes alone, between an agent and its child
from pathlib import Path
from typing import Any, NoReturn

from elastic.config import environment
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED
from elastic.system import stop_signals
from elastic.system import worker_protocol as protocol
from elastic.system.processes import die_with_parent, thread_count
from elastic.system.untrusted import decode, encode
from elastic.worker.main import run_recipe
from elastic.worker.preload import Preloaded, begin, preload

GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")
OUTPUTS = (1, 2)  # a worker's standard output and error, whose descriptors come with each request
IMPORT_OUTPUT_LIMIT_BYTES = 64 * 1024


@dataclass(slots=True)
class ForkServer:
    agent: Connection
    preloaded: Preloaded | None = None  # None where nothing is to be inherited
    signals: dict[signal.Signals, Any] = field(default_factory=dict)  # the handlers that workers begin with
    import_output: bytes = b""  # what this process printed while it imported
    workers: dict[int, int] = field(default_factory=dict)  # pids, by pidfd

    def serve(self) -> None:
        """Return when the agent is gone. Requests and exits of workers both wake `poll`."""
        self.signals = {number: signal.getsignal(number) for number in stop_signals.ALL}
        stop_signals.ignore()  # its death would be the death of workers that are to finish their step
        # If SIGCHLD is ignored, the kernel drops exit codes.
        self.signals[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while True:
            # `select` would refuse descriptors above 1023, and imports may have as many files open.
            poll = select.poll()
            for descriptor in (self.agent.fileno(), *self.workers):
                poll.register(descriptor, select.POLLIN)
            readable = {descriptor for descriptor, _ in poll.poll()}
            for pidfd in self.workers.keys() & readable:
                self._report_exit(pidfd)
            if self.agent.fileno() in readable:
                try:
                    message = self.agent.recv_bytes()
                except (EOFError, OSError):
                    return
                self._answer(decode(protocol.FromAgent, message, what="a message of the agent"))

    def _answer(self, request: protocol.FromAgent) -> None:
        if isinstance(request, protocol.Preload):
            self.preloaded = None if request.modules is None else self._preload(request.modules)
            self._send(protocol.Ready(gpus=None if self.preloaded is None else count_gpus()))
            return
        outputs = [recv_handle(self.agent) for _ in OUTPUTS]
        passed = {name: recv_handle(self.agent) for name in request.passes}
        self._send(self._start(request, outputs, passed))
        for descriptor in (*outputs, *passed.values()):
            os.close(descriptor)

    def _preload(self, modules: Sequence[str]) -> Preloaded:
        # Importing makes many objects and drops few: collecting them takes a tenth of its time.
        gc.disable()
        preloaded = preload(modules, self.preloaded)
        # A package may have set a handler of its own while it was imported. A worker that imports
        # for itself would keep it, so forked workers get it back; this process goes on as before.
        for number in self.signals:
            here = signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN
            if (handler := signal.signal(number, here)) is not here:
                self.signals[number] = handler
        # Finalizers of what was imported here must not run in each worker that exits. A package's
        # temporary folder would be gone with the first of them, and torch's operators alone, taken
        # back one by one, would delay the exit by 100 ms.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # noqa: SLF001
            finalizer.atexit = False
        sys.stdout.flush()
        sys.stderr.flush()
        # A collection writes to every object that it visits, and so would copy the memory that the
        # workers share. Frozen objects are not visited.
        gc.collect()
        gc.freeze()
        gc.enable()
        self.import_output = os.pread(1, IMPORT_OUTPUT_LIMIT_BYTES, 0)  # the agent made it a file
        return preloaded

    def _report_exit(self, pidfd: int) -> None:
        pid = self.workers.pop(pidfd)
        os.close(pidfd)
        # Data-loading processes may outlive it. As long as it is not reaped, the kernel gives its
        # number, which is that of its session, to no other process.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._send(protocol.Exited(pid=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

    def _start(
        self, request: protocol.StartRequest, outputs: list[int], passed: dict[str, int]
    ) -> protocol.Started:
        """Returns in the parent alone."""
        recipe, parent = Path(request.command[0]), os.getpid()
        preloaded = self.preloaded
        obstacle = None if preloaded is None else fork_obstacle(preloaded, recipe.resolve().parent)
        inherits = preloaded is not None and obstacle is None
        with stop_signals.blocked():  # the worker unblocks them
            try:
                pid = os.fork()
            except OSError as error:
                return protocol.Started(pid=None, reason=f"no process can be started ({error})")
            if not pid:
                # The edge of a process: an exception that passed here would make the worker a
                # second fork server.
                try:
                    die_with_parent(parent)
                    self._become_worker(request, outputs, passed, inherits=inherits)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(EXIT_FAILED)
        # If this raises, the fork server ends, and so does the worker that it could not watch.
        self.workers[os.pidfd_open(pid)] = pid
        return protocol.Started(pid=pid, reason=obstacle)

    def _become_worker(
        self, request: protocol.StartRequest, outputs: list[int], passed: dict[str, int], *, inherits: bool
    ) -> NoReturn:
        """Close the fork server's descriptors, set what differs between workers, and run."""
        os.setsid()
        for number, handler in self.signals.items():
            if handler is not None:  # None: set by C code, and Python cannot set it again
                signal.signal(number, handler)
        for target, descriptor in zip(OUTPUTS, outputs, strict=True):
            os.dup2(descriptor, target)
        env = request.env | {name: str(descriptor) for name, descriptor in passed.items()}
        recipe, *arguments = request.command
        if not inherits:
            for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers
                if descriptor > max(OUTPUTS):
                    with suppress(OSError):  # that of the listing itself
                        os.set_inheritable(descriptor, descriptor in passed.values())
            # In the new program ignored signals stay ignored, and handled ones have their default.
            words = [sys.executable, "-P", "-u", "-m", "elastic.worker.main", *request.command]
            os.execve(sys.executable, words, env)  # noqa: S606 - no shell is wanted
        assert self.preloaded is not None
        self.agent.close()
        for descriptor in (*self.workers, *outputs):
            os.close(descriptor)
        with suppress(OSError):  # a preflight's terminal may be gone
            os.write(2, self.import_output)  # as if this process had done the importing
        environment.replace(env)
        begin(self.preloaded)
        run_recipe(recipe, arguments)

    def _send(self, message: protocol.FromServer) -> None:
        self.agent.send_bytes(json.dumps(encode(message)).encode())


def fork_obstacle(preloaded: Preloaded, folder: Path) -> str | None:
    """Why no worker can go on as a fork of this process now; None when one can.

    folder: the recipe's.
    """
    if thread_count() > 1:
        return f"importing left {thread_count() - 1} threads running, which a forked process would lack"
    if any(os.path.realpath(link).startswith(GPU_DEVICES) for link in Path("/proc/self/fd").iterdir()):
        return "importing opened a GPU, which a forked process cannot use"
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return "torch could not be imported"
    if torch.cuda.is_initialized():
        return "importing initialized CUDA, which a forked process cannot use"
    if torch.distributed.is_initialized():
        return "importing initialized a process group, which a forked process cannot share"
    return preloaded.conflict(folder)


def count_gpus() -> int:
    """How many torch finds. A child counts: that may initialize CUDA, which no fork survives."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    child = os.fork()
    if not child:
        found = 0
        with suppress(BaseException):
            found = torch.cuda.device_count()
        os._exit(min(found, 255))
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def main() -> None:
    descriptor, agent_pid = map(int, sys.argv[1:])
    die_with_parent(agent_pid)  # before anything else: importing takes seconds
    with Connection(descriptor) as agent:
        ForkServer(agent).serve()
    os._exit(EXIT_COMPLETE)


if __name__ == "__main__":
    main()
