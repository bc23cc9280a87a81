"""Silence counts only while its observer is watching, so a starved observer accuses no subject.

An observer polls, adds the time since its last poll to the silence of everything that gave no sign,
and takes a subject for dead or hung once its silence exceeds a limit. If the observer itself was
stopped (SIGSTOP, a suspended machine, a starved CPU), that time says nothing about the subject: its
signs could not be seen. So one poll adds at most a quarter of the limit, however long the observer
was away. A subject that was giving signs before is then far from its limit. A subject without signs
is accused at the fifth poll after its first at the earliest.

It does not promise to be right: a subject that is slow, not dead, is accused as well.
"""

from dataclasses import dataclass
from enum import IntEnum

POLLS_WITHIN_LIMIT = 4


def attended_s(elapsed_s: float, *, limit_s: float) -> float:
    """What one more poll without a sign, `elapsed_s` after the last poll, adds to a silence."""
    return min(elapsed_s, limit_s / POLLS_WITHIN_LIMIT)


class Phase(IntEnum):
    """A worker is in one phase of its work at a time; its agent allows each a silence of its own.

    The order of the numbers means nothing.
    """

    START = 0  # imports, building the model, restoring, and the first steps of a generation
    STEP = 1  # this rank's part of the sums and gradients of a step
    WAIT = 2  # inside a collective operation of a step, for other ranks
    BETWEEN = 3  # the recipe's own code: before and after the sums of a step, evaluation, loading
    SAVE = 4  # copying or comparing the state, or waiting for the last commit
    AFTER = 5  # the recipe's own code after the last step is saved, which may take any time


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one worker shows of itself.

    `step` is the last step that it finished in this generation (0 before its first); `beats` is a
    counter that grows while it moves.
    """

    step: int
    phase: Phase
    beats: int
