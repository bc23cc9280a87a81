"""A worker process never outlives its agent, runs the recipe as `__main__`, and always says how it ended.

It is forked from the warm parent, or started as `python -m elastic.worker.main RECIPE ARGUMENTS...`, under torchrun's variables and the agent's. Any
script runs in it, one that uses none of this library as well.
"""

import atexit
import ctypes
import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, TextIO

from elastic.config import environment
from elastic.config.environment import AgentLink
from elastic.errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_PEER_LOST,
    EXIT_USAGE,
    ElasticError,
    PeerLost,
    UsageError,
)
from elastic.worker.heartbeat import show_stacks_on_request

PR_SET_PDEATHSIG = 1


def main() -> None:
    """The process itself, where it was not forked."""
    launch = environment.read()
    if launch.agent is not None:
        die_with_parent(launch.agent.pid)
    elif launch.preflight is not None:
        die_with_parent(os.getppid())
    recipe, *arguments = sys.argv[1:]
    perform(recipe, arguments)


def perform(recipe: str, arguments: list[str]) -> NoReturn:
    """Run the recipe in this process, which is to end with it, under the environment as it is now."""
    launch = environment.read()
    if launch.agent is not None:
        # A terminal's Ctrl-C is for the agent, which asks for a drain.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    show_stacks_on_request()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, unbuffered(descriptor, getattr(sys, name)))
    sys.argv = [recipe, *arguments]
    sys.path[0] = str(Path(recipe).resolve().parent)
    try:
        if launch.preflight is None:
            take_device(launch.local_rank)
        runpy.run_path(recipe, run_name="__main__")
        end(EXIT_COMPLETE)
    except UsageError as error:
        report(launch.agent, launch.rank, error)
        leave(EXIT_USAGE, f"error: {error}")
    except PeerLost as error:
        report(launch.agent, launch.rank, error)
        leave(EXIT_PEER_LOST, f"{error}\nthis worker is a victim; the agent begins a new generation")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            report(launch.agent, launch.rank, stop)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        end(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    # The edge of the process: without this a recipe's exception would leave no word of it for the agent, and threads
    # that wait for a dead peer would keep this process from ending at all.
    except BaseException as error:
        report(launch.agent, launch.rank, error)
        leave(error.exit_code if isinstance(error, ElasticError) else EXIT_FAILED, traceback_of(error))


class _Log(io.FileIO):
    """What a worker prints goes to a file in the run directory: a full disk costs lines of it, never the training."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def unbuffered(descriptor: int, like: TextIO) -> TextIO:
    """What a worker prints is in its log at once, as with `python -u`."""
    raw = _Log(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=like.encoding, errors=like.errors, write_through=True)


def end(code: int) -> NoReturn:
    """As the interpreter ends, less its last part: threads of gloo that drop a tensor while it finalizes abort the process."""
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - joins threads that are no daemons
    atexit._run_exitfuncs()  # noqa: SLF001
    leave(code, "")


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent, agent or warm parent, dies; Linux only, elsewhere a lost agent is noticed at the next collective."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel knew
        os._exit(EXIT_FAILED)


def take_device(local_rank: int) -> None:
    """Make this worker's GPU the current one before any code can touch another."""
    import torch  # after PDEATHSIG: importing takes seconds

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def traceback_of(error: BaseException) -> str:
    """The traceback from the recipe's first line on: the frames that only start it say nothing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def report(agent: AgentLink | None, rank: int, error: BaseException) -> None:
    """Leave the error where the agent finds it, as one JSON object, whole or not at all."""
    if agent is None:
        return
    path = Path(agent.error_folder) / f"rank{rank}.json"
    record = {
        "rank": rank,
        "message": f"{type(error).__name__}: {error}",
        "traceback": traceback_of(error),
        "time": time.time(),
    }
    try:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(path)
    except OSError as problem:  # a full disk: the log, or the terminal, still has the traceback
        print(f"error not written to {path}: {problem}", file=sys.stderr)


def leave(code: int, words: str) -> NoReturn:
    """End now: interpreter shutdown would wait for threads that wait for peers."""
    if words:
        print(words.rstrip(), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
