"""A worker that fails leaves an error file, whole or not at all, and its agent reads it.

It says what the worker's exception was. The format stands here because `elastic.agent` must not
import `elastic.worker`.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.divergence import Divergence
from elastic.system.untrusted import decode, encode

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
