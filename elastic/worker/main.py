"""A worker runs the recipe as `__main__`, never outlives its agent, and reports how it failed.

It is forked from the fork server, or executed by the fork as `python -m elastic.worker.main RECIPE
ARGUMENTS...`, under torchrun's variables and the agent's. Any script runs in it, also one that uses
none of this library. By then the kernel knows that it dies with the fork server.

The order of the first steps matters. Nothing here imports torch, whose import may depend on
settings of the recipe's first lines. Standard output is replaced before the first line of the
recipe may print.

The end is `os._exit` on every path. An interpreter that shuts down joins threads and finalizes
objects: threads that wait for a dead peer would keep the process for ever, and gloo's threads abort
the process when they drop a tensor while the interpreter finalizes.
"""

import atexit
import faulthandler
import io
import runpy
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, NoReturn, TextIO

from elastic.config import environment
from elastic.config.environment import AgentLink, Assignment
from elastic.errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    ElasticError,
    NothingLoads,
    PeerLost,
    RecipeNotExact,
    ReplayDiffers,
    StatesDiffer,
    UsageError,
)
from elastic.system import forked_child, global_random, stop_signals
from elastic.system.clock import since_boot_s
from elastic.system.worker_protocol import QUOTED, WorkerError, write_error
from elastic.worker import script_end

_EXPLAINED = (UsageError, NothingLoads, StatesDiffer, RecipeNotExact, ReplayDiffers)


def run_recipe(recipe: str, arguments: list[str]) -> NoReturn:
    """Run the recipe in this process, under its environment as it is now, and end with it."""
    environment.begin_standby()
    _assigned.clear()
    agent = _agent()
    if agent is not None or environment.is_standby():
        # A terminal's Ctrl-C is for the agent, which asks for a drain. So are warnings.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_signals.ignore_warnings()
    stop_signals.unblock()
    faulthandler.enable()
    # SIGQUIT writes the stacks of all threads to stderr (agent/watchdog.py).
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, unbuffered(descriptor, getattr(sys, name)))
    sys.argv = [recipe, *arguments]
    # With -P, which keeps the working directory out, no folder comes before the library's.
    sys.path[:1] = [str(Path(recipe).resolve().parent), *(sys.path[:1] if sys.flags.safe_path else [])]
    if is_of_recipe():
        global_random.seed_alike()
    # A standby may come to do a step again.
    disturbs = environment.is_standby() or (agent is not None and agent.disturbs)
    disturbed = disturb_memory() if disturbs else None
    forked_child.begin()
    script_end.fail_with(end_failed)
    try:
        run_script(recipe)
        del disturbed
        exit_cleanly(EXIT_COMPLETE)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            report_error(stop)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        exit_cleanly(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    # The edge of the process: without this the agent would find no error file after a recipe's
    # exception, and threads that wait for a dead peer would keep this process from exiting.
    except BaseException as error:
        end_failed(error)


def disturb_memory() -> list[list[bytes]]:
    """Objects to keep, with holes between them in random order, which later objects fill.

    Forks of one process have the same addresses, by which Python orders a set of modules.
    """
    kept = [[bytes(size) for _ in range(512)] for size in range(1, 480, 16)]
    for of_size in kept:
        SystemRandom().shuffle(of_size)
        del of_size[256:]
    return kept


_assigned: list[Assignment] = []  # of this process, once it is known: a script may change variables


def _agent() -> AgentLink | None:
    """None also in a standby that has no assignment yet."""
    if not _assigned and not environment.is_standby():
        _assigned.append(environment.read_assignment())
    return _assigned[0].agent if _assigned else None


def is_of_recipe() -> bool:
    """Whether the script imports this library."""
    if environment.is_standby() or environment.read().preflight is not None:
        return True
    agent = _agent()
    return agent is not None and agent.imports_library


def end_failed(raised: BaseException) -> NoReturn:
    """End this process with what failed."""
    error = script_end.explain(raised)
    if is_of_recipe() and script_end.opens_group(raised.__traceback__):
        error = UsageError(script_end.OWN_GROUP).with_traceback(raised.__traceback__)
    report_error(error)
    last_words = traceback_of(error)
    if isinstance(error, _EXPLAINED):
        last_words = explained(error, last_words)
    elif isinstance(error, PeerLost):
        last_words = of_victim(error)
    with suppress(ValueError):  # the script has closed it
        print(last_words.rstrip(), file=sys.stderr)
    forked_child.end(error.exit_code if isinstance(error, ElasticError) else EXIT_FAILED)


def explained(error: BaseException, line: str) -> str:
    """The sentence of an error, and its line. Under an agent they are for the log alone: the agent
    says them once, as the end of the generation or of the run.
    """
    words = f"error: {error}\n{line}"
    return words if _agent() is None else "\n".join(f"{QUOTED}{each}" for each in words.splitlines())


def of_victim(error: PeerLost) -> str:
    """What a worker says that lost a peer. What its collective says of it is for its log."""
    words = "" if error.__cause__ is None else str(error.__cause__)
    sentence = str(error).removesuffix(f": {words}")
    quoted = [f"{QUOTED}{line}" for line in words.splitlines()]
    return "\n".join([f"{sentence}: this worker is a victim, and the agent begins a new generation", *quoted])


def run_script(recipe: str) -> None:
    """Returns when the script and what it began have ended well."""
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    script_end.reached()


class _Log(io.FileIO):
    """A worker's log: what it does not take is lost, and ends no training."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


def unbuffered(descriptor: int, like: TextIO) -> TextIO:
    """A stream whose text is in the log at once, as with `python -u`, encoded as `like` is."""
    raw = _Log(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=like.encoding, errors=like.errors, write_through=True)


def exit_cleanly(code: int) -> NoReturn:
    """Exit as the interpreter does, with `atexit` functions, but without finalizing objects."""
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    forked_child.end(code)


def of_recipe(error: BaseException) -> TracebackType | None:
    """The traceback from the recipe's first line on: the frames before it only start the recipe."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def traceback_of(error: BaseException) -> str:
    """Of an error that a sentence explains, the recipe's own line alone."""
    if isinstance(error, _EXPLAINED):
        return script_end.own_line(error.__traceback__)
    described = traceback.TracebackException(type(error), error, of_recipe(error))
    return "".join(described.format())


def report_error(error: BaseException) -> None:
    """Leave the error where the agent finds it; without an agent there is no such place.

    Nor is there one for a child that the script forked: its error is not that of this rank.
    """
    agent = _agent()
    if agent is None or forked_child.is_one():
        return
    left = WorkerError(
        rank=_assigned[0].rank,
        message=str(error) if isinstance(error, _EXPLAINED) else f"{type(error).__name__}: {error}",
        traceback=traceback_of(error),
        time=since_boot_s(),
        divergence=error.divergence if isinstance(error, StatesDiffer) else None,
    )
    try:
        write_error(Path(agent.error_folder), left)
    except OSError as problem:  # a full disk: the log, or the terminal, still has the traceback
        print(f"error not written to {agent.error_folder}: {problem}", file=sys.stderr)


if __name__ == "__main__":
    run_recipe(sys.argv[1], sys.argv[2:])
