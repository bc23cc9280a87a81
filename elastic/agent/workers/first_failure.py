"""A failure is told of the worker that failed first, in its own words where it left any; victims are not blamed while a culprit is known.

It knows one node's workers. Which node's word counts is the group's business: the first that closes the generation.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
from elastic.system.untrusted import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """What a worker left in its error file."""

    rank: int
    message: str
    traceback: str
    time: float


def read_errors(folder: Path, ranks: list[int]) -> list[WorkerError]:
    """The error files of these ranks; one that is missing or torn tells nothing."""
    told = []
    for rank in ranks:
        try:
            left = (folder / f"rank{rank}.json").read_bytes()
            told.append(decode(WorkerError, left, what="a worker's error"))
        except (OSError, ValueError):
            continue
    return told


def first_failure(
    codes: Mapping[int, int], killed: set[int], told: list[WorkerError], reason: str
) -> WorkerError:
    """codes: exit codes by rank, in the order in which they were seen; killed: ranks that the agent itself ended.

    Where several culprits left word, the earliest, also of a rank that is still ending: its sockets close before anybody sees its exit code, and a
    victim may be quicker. One that was killed from outside leaves none, and `reason` speaks for it.
    """
    culprits = [
        rank
        for rank, code in codes.items()
        if code not in (EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST) and rank not in killed
    ]
    words = [word for word in told if word.rank in culprits]
    ending = [word for word in told if word.rank not in codes]
    if words:
        return min([*words, *ending], key=lambda word: word.time)
    if told and not culprits:
        return min(ending or told, key=lambda word: word.time)
    first = culprits[0] if culprits else next(iter(codes), -1)
    return WorkerError(rank=first, message=reason, traceback="", time=0.0)


def is_from_outside(codes: Mapping[int, int], rank: int) -> bool:
    """Whether SIGKILL ended it, which comes from outside, or for want of memory: nothing that it computed can have done that."""
    return codes.get(rank) == -signal.SIGKILL
