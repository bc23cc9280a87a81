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
    """The descriptors of the worker's stdout and stderr follow it, and then those whose numbers it
    finds in the variables `passes`.
    """

    command: tuple[str, ...]  # the recipe and its arguments
    env: dict[str, str]  # the whole environment
    passes: tuple[str, ...] = ()


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
    """A worker has exited, and what it left in its process group was killed; sent at any time, also
    between a request and its answer.
    """

    pid: int
    code: int  # or minus the number of the signal that ended it


# No two messages have the same keys, so each names itself.
FromAgent = Preload | StartRequest
FromServer = Ready | Started | Exited


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
