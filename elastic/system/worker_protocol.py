"""A message between an agent, its fork server and its workers comes whole, or not at all.

The messages stand here because neither side may own them: `elastic.agent` must not import
`elastic.worker`, so that no code of a worker runs in the agent. Both ends run the same version of
this library, so a message may change without regard to older ones.

Agent and fork server exchange the messages of `FromAgent` and `FromServer`, and no others. Each is
one JSON object, over a connection of multiprocessing, whose pickles are not used.

A worker that fails leaves an error file, whole or not at all, and its agent reads it. It says what
the worker's exception was. Of a traceback, a person looks for the lines of the user's own code:
those that lie neither in this library nor among what is installed.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb
from types import TracebackType

from elastic.divergence import Divergence
from elastic.system.untrusted import decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """The first request; it is repeated when more modules are known.

    modules: installed ones that the recipe imports, beside those that every worker needs; None to
    import nothing, and to spawn every process from now on.
    """

    modules: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """The descriptors of the worker's stdout and stderr follow it, and that of the socket on which
    the worker serves the generation's store, if it does.
    """

    command: tuple[str, ...]  # the recipe and its arguments
    env: dict[str, str]  # the whole environment
    serves_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer to Preload, once all is imported."""

    gpus: int | None  # how many torch finds; None where nothing is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The answer to StartRequest.

    pid: of the process, which runs; None where none can be started. reason: why not, or why it was
    not forked; None if it was.
    """

    pid: int | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker has exited, and what it left in its session was killed; sent at any time, also
    between a request and its answer.
    """

    pid: int
    code: int  # or minus the number of the signal that ended it


# No two messages have the same keys, so each names itself.
FromAgent = Preload | StartRequest
FromServer = Ready | Started | Exited


_INSTALLED = tuple(f"{get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARY = f"{Path(__file__).parents[1]}/"
_TORCH = "/torch/distributed/"  # its decorators stand between
OWN_GROUP = (
    "expected a recipe without init_process_group, found a call of it; leave it out: "
    "elastic.start opens the process groups that it needs"
)
# Begins lines of a log that the console leaves out: the agent says them, or nobody needs to.
QUOTED = "in the words of the library: "


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """divergence: what the worker knows of a difference between ranks, if that ended it."""

    rank: int
    message: str
    traceback: str
    time: float  # seconds since the machine booted
    divergence: Divergence | None = None


def write_error(folder: Path, error: WorkerError) -> None:
    """Raises OSError."""
    file = _file(folder, error.rank)
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(encode(error)))
    draft.replace(file)


def read_errors(folder: Path, ranks: list[int]) -> list[WorkerError]:
    """The error files of these ranks; missing and damaged ones are left out."""
    errors = []
    for rank in ranks:
        with suppress(OSError, ValueError):
            data = _file(folder, rank).read_bytes()
            errors.append(decode(WorkerError, data, what="a worker's error file"))
    return errors


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def own_line(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code, with its file; empty where there is none.

    For errors of this library, whose sentence says it: its own frames, and torch's,
    would only hide the line to change. trace: from any frame before it on.
    """
    own = [frame for frame in extract_tb(trace) if _is_own(frame.filename)]
    return f"  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def opens_group(trace: TracebackType | None) -> bool:
    """Whether the user's own code called the torch.distributed.init_process_group that failed.

    Before `elastic.start` torch only says which of its variables is missing.
    """
    stack = extract_tb(trace)
    calls = [number for number, frame in enumerate(stack) if frame.name == "init_process_group"]
    callers = [frame.filename for frame in stack[: min(calls, default=0)] if _TORCH not in frame.filename]
    return bool(callers) and _is_own(callers[-1])


def _is_own(filename: str) -> bool:
    return not filename.startswith(("<", _LIBRARY, *_INSTALLED))
