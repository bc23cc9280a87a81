"""When all workers are started anew on purpose is a function of steps and of measured seconds.

The first rehearsal is of step 3; the second of the second step after the first epoch's end, since
counters and loops that a restart does not bring back act there; the next ones come at doubling
distances. Each waits until it costs at most one percent of the time so far; the first two may cost
five seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_STEP = 3
AFTER_EPOCH = 2
EARLY, ALWAYS_S, SHARE = 2, 5.0, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A step whose computations were compared after a restart of any kind; how long that took."""

    step: int
    seconds: float


def is_due(
    step: int, *, epoch_end: int, before: Sequence[Rehearsed], cost_s: float, trained_s: float
) -> bool:
    """Whether `step` is to be rehearsed: done, and done again by new workers.

    epoch_end: the last step of the first epoch. before: those of this run, in order. cost_s: what
    one costs, as far as is known. trained_s: how long the run has trained.
    """
    if cost_s > max(ALWAYS_S if len(before) < EARLY else 0.0, SHARE * trained_s):
        return False
    wanted = FIRST_STEP
    if before:
        last = before[-1].step
        second = max(epoch_end + AFTER_EPOCH, FIRST_STEP + 1)
        wanted = second if last < second else 2 * last
    return step >= wanted
