"""The steps of rehearsals are a function of step numbers and of measured seconds.

The first rehearsal is of step 3; the second of the second step after the first epoch's end, since
counters and loops that a restart does not bring back act there; the next ones come at doubling
distances. Each waits until it costs at most one percent of the time so far; the first two may cost
five seconds. What was compared before is read from the files of the run.
"""

from collections.abc import Sequence
from pathlib import Path

from elastic.config.durations import Every
from elastic.data.order import SampleOrder
from elastic.events import GenerationStarted, Overlapped, Rehearsed, RunStarted
from elastic.observe.log import read_rare
from elastic.system.clock import Clock

FIRST_STEP = 3
AFTER_EPOCH = 2
EARLY, ALWAYS_S, SHARE = 2, 5.0, 0.01

Compared = Rehearsed | Overlapped


def is_due(step: int, *, epoch_end: int, before: Sequence[int], cost_s: float, trained_s: float) -> bool:
    """Whether `step` is to be rehearsed: done, and done again by new workers.

    epoch_end: the last step of the first epoch. before: the steps that were compared after a
    restart of any kind, in order. cost_s: what a rehearsal costs, as far as is known. trained_s:
    how long the run has trained.
    """
    if cost_s > max(ALWAYS_S if len(before) < EARLY else 0.0, SHARE * trained_s):
        return False
    wanted = FIRST_STEP
    if before:
        second = max(epoch_end + AFTER_EPOCH, FIRST_STEP + 1)
        wanted = second if before[-1] < second else 2 * before[-1]
    return step >= wanted


class Rehearsals:
    """On rank 0, which decides for all ranks. To be made before the state is restored."""

    def __init__(self, every: Every, order: SampleOrder, events: Path, recipe: str, clock: Clock) -> None:
        """recipe: its text and arguments, as a checksum; others say nothing of this one."""
        self._every = every
        self._clock = clock
        self._epoch_end = next(step for step in range(1, order.steps + 1) if order.ends_epoch(step))
        done: list[Compared] = [each.event for each in read_rare(events, Rehearsed)]
        done += [each.event for each in read_rare(events, Overlapped)]
        done = sorted((each for each in done if each.recipe == recipe), key=lambda each: each.step)
        self._before = [each.step for each in done]
        now_s = clock.wall()
        started = [each.time for each in read_rare(events, GenerationStarted)]
        self._cost_s = done[-1].seconds if done else now_s - max(started, default=now_s)
        self._from = 1 + max(self._before, default=0)  # none is due before this step
        self._began_s = min((each.time for each in read_rare(events, RunStarted)), default=now_s)

    def is_due(self, step: int) -> bool:
        """Asked in each step."""
        if step < self._from:
            return False
        if self._every.kind == "steps":
            return step % int(self._every.value) == 0
        trained_s = self._clock.wall() - self._began_s
        return is_due(
            step, epoch_end=self._epoch_end, before=self._before, cost_s=self._cost_s, trained_s=trained_s
        )

    def asked(self, step: int) -> bool:
        """All ranks know of it. Returns whether other ranks compute its shards, which they do in
        turns. It may find no room: the next one is not due at once.
        """
        self._from = 2 * step
        return len(self._before) % 2 == 0

    def compared(self, done: Compared) -> None:
        self._before.append(done.step)
        self._cost_s = done.seconds
        self._from = done.step + 1
