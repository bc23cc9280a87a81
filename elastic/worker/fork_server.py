"""A worker is forked only from a process that provably has one thread, no GPU open and no process group: the warm parent.

The first is split off from the agent once that has imported torch; later ones run as `python -u -m elastic.worker.fork_server RECIPE DESCRIPTOR AGENT_PID`. One per
agent, it imports what the recipe's workers will need, and never runs a line of the user's own. The descriptor is its end of a socket pair; both sides say one JSON object a line:

    agent   {"fork": [RECIPE, ARGUMENTS...], "env": {...}}, with the descriptors of the worker's stdout and stderr
    here    {"ready": true} once; then {"pid": n} or {"unfit": reason} to each request; {"exited": n, "code": c} when a worker ended,
            c is minus the signal's number where a signal ended it

It dies with the agent, and its workers die with it. It does not restart itself, and knows nothing of generations.
"""

import gc
import os
import select
import signal
import socket
import sys
import traceback
import weakref
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from elastic.errors import EXIT_COMPLETE, EXIT_FAILED
from elastic.system.json_lines import JsonLineSocket
from elastic.system.processes import threads
from elastic.worker.main import die_with_parent, perform, unbuffered
from elastic.worker.preload import Preloaded, preload

GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")
# A scheduler may signal every process of a job. The agent decides what a signal means; this process must outlast its workers.
PASSED_BY = (signal.SIGTERM, signal.SIGINT)
OUTPUTS = (1, 2)  # a worker's standard output and error, whose descriptors come with each request
PRINTED_LIMIT_BYTES = 64 * 1024
REQUEST_LIMIT_BYTES = 32 * 1024 * 1024  # an environment and arguments, of which Linux takes 6 MB at most
_WAKE_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class ForkServer:
    agent: JsonLineSocket
    preloaded: Preloaded
    signals: dict[signal.Signals, Any]  # what workers begin with
    printed: bytes  # while it imported
    workers: set[int] = field(default_factory=set)
    woken: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def serve(self) -> None:
        """Until the agent is gone. Nothing here polls: a request and a worker's end both wake it."""
        for end in self.woken:
            end.setblocking(False)
        signal.set_wakeup_fd(self.woken[1].fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._tell({"ready": True})
        sources: tuple[JsonLineSocket | socket.socket, ...] = self.agent, self.woken[0]
        while True:
            readable, _, _ = select.select(sources, [], [])
            if self.woken[0] in readable:
                self.woken[0].recv(_WAKE_BYTES)
                self._reap()
            if self.agent in readable:
                for request in self.agent.receive():
                    self._answer(request, [self.agent.take_fd() for _ in OUTPUTS])
                if self.agent.has_ended:
                    return

    def _reap(self) -> None:
        for pid in sorted(self.workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.workers.remove(pid)
                self._tell({"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, request: dict[str, Any], outputs: list[int]) -> None:
        try:
            reason = unfit(self.preloaded)
            if reason is None:
                pid = self._fork(request, outputs)
                self.workers.add(pid)
                self._tell({"pid": pid})
            else:
                self._tell({"unfit": reason})
        except OSError as error:
            self._tell({"unfit": f"fork failed: {error}"})
        finally:
            for descriptor in outputs:
                os.close(descriptor)

    def _fork(self, request: dict[str, Any], outputs: list[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        # The edge of a process: an exception that passed here would make the worker a second warm parent.
        try:
            die_with_parent(parent)
            self._forget()
            become_worker(request, outputs, self.printed)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(EXIT_FAILED)

    def _forget(self) -> None:
        """In the worker: give up all that is the warm parent's."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number, disposition in self.signals.items():
            if disposition is not None:  # None: set by C code, which has no name for it
                signal.signal(number, disposition)
        for end in (self.agent, *self.woken):
            end.close()

    def _tell(self, message: dict[str, Any]) -> None:
        self.agent.send(message, timeout_s=None)


def become_worker(request: dict[str, Any], outputs: list[int], printed: bytes) -> NoReturn:
    """What differs between two workers: where they write, their environment, their random numbers, their arguments."""
    for target, descriptor in zip(OUTPUTS, outputs, strict=True):
        os.dup2(descriptor, target)
    for descriptor in outputs:
        os.close(descriptor)
    with suppress(OSError):  # a preflight's terminal may be gone
        os.write(2, printed)  # as if this process had done the importing
    os.environ.clear()
    os.environ.update(request["env"])
    draw_anew()
    recipe, *arguments = request["fork"]
    perform(recipe, arguments)


def draw_anew() -> None:
    """Workers that import for themselves draw random numbers of their own until they seed; `random` sees to that by itself where it is forked."""
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def unfit(preloaded: Preloaded) -> str | None:
    """Why no worker can be forked from this process; None when one can. Looked at anew for each worker."""
    if threads() > 1:
        return f"importing left {threads() - 1} threads running, which a forked process would lack"
    if any(target.startswith(GPU_DEVICES) for target in _open_files()):
        return "importing opened a GPU, which a forked process cannot use"
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return "torch could not be imported"
    if torch.cuda.is_initialized():
        return "importing initialized CUDA, which a forked process cannot use"
    if torch.distributed.is_initialized():
        return "importing initialized a process group, which a forked process cannot share"
    return preloaded.flaw()


def _open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(str(link.readlink()))
    return found


def go_on(recipe: Path, agent: socket.socket, agent_pid: int, printed: IO[bytes]) -> NoReturn:
    """In a process that the agent has just forked from itself: become what a new one would be."""
    # The edge of a process: an exception that passed here would make it a second agent.
    try:
        die_with_parent(agent_pid)
        os.setsid()
        connection = agent.detach()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
        os.close(nothing)
        printed.close()
        # As `python -u`: what a worker prints is in its log at once.
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = unbuffered(descriptor, getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        _serve(recipe, connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(EXIT_FAILED)


def main() -> None:
    recipe, descriptor, agent_pid = sys.argv[1:]
    die_with_parent(int(agent_pid))  # first of all: importing takes seconds
    _serve(Path(recipe), int(descriptor))
    os._exit(EXIT_COMPLETE)


def _serve(recipe: Path, descriptor: int) -> None:
    """Until the agent is gone."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in PASSED_BY}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_BY)  # blocked by the agent until here
    gc.disable()  # importing makes much and drops little: a tenth of its time
    connection = socket.socket(fileno=descriptor)
    with closing(JsonLineSocket(connection, limit_bytes=REQUEST_LIMIT_BYTES, most_fds=len(OUTPUTS))) as agent:
        preloaded = preload(recipe)
        # A package may have set a handler of its own while it was imported, as it would have in a worker.
        during = {number: signal.signal(number, signal.SIG_IGN) for number in PASSED_BY}
        signals = {n: before[n] if during[n] is signal.SIG_IGN else during[n] for n in PASSED_BY}
        signals[signal.SIGCHLD] = signal.getsignal(signal.SIGCHLD)
        # What importing made is not for each worker to undo; torch's operators alone, taken back one by one, would cost its end 100 ms.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # noqa: SLF001
            finalizer.atexit = False
        sys.stdout.flush()
        sys.stderr.flush()
        # Workers share these objects' memory for as long as nobody writes to it, and a collection writes to everything it looks at.
        gc.collect()
        gc.freeze()
        gc.enable()
        printed = os.pread(1, PRINTED_LIMIT_BYTES, 0)  # its output is a file
        ForkServer(agent=agent, preloaded=preloaded, signals=signals, printed=printed).serve()


if __name__ == "__main__":
    main()
