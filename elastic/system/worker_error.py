"""A worker that fails leaves an error file, whole or not at all, and its agent reads it.

It says what the worker's exception was and where the run stood, so that the agent knows it again.
The format stands here because `elastic.agent` must not import `elastic.worker`.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.divergence import Divergence
from elastic.system.untrusted import Count, decode, encode

# Begins lines of a log that the console leaves out: the agent says them, or nobody needs to.
QUOTED = "in the words of the library: "

# A state from which that many generations made no new step gives way to the next older one.
RESTORES_OF_ONE_STATE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPlace:
    """where: as the end of a sentence, such as "in step 9"; it names the step.

    resumed: the step whose state the generation began from, None where the recipe had not asked for
    a state yet. has_older: an older one is committed.
    """

    where: str
    resumed: Count | None = None
    has_older: bool = False


BEFORE_THE_LOOP = ErrorPlace(where="before step 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedError:
    """kind: the name of its class. line: the innermost one of the recipe, with its file."""

    kind: str
    message: str
    line: str
    place: ErrorPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """divergence: what the worker knows of a difference between ranks, if that ended it.

    raised: an exception that is the program's own; None where a restart may mend it.
    """

    rank: int
    message: str
    traceback: str
    time: float  # seconds since the machine booted
    divergence: Divergence | None = None
    raised: RaisedError | None = None


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
