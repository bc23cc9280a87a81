"""Which steps of a run are rehearsed, by what its files say of those before (proof/schedule.py)."""

from pathlib import Path

from elastic.config.durations import Every
from elastic.data.order import SampleOrder
from elastic.events import GenerationStarted, Overlapped, RunStarted
from elastic.events import Rehearsed as RehearsedEvent
from elastic.observe.log import read_rare
from elastic.proof.schedule import Rehearsed, is_due
from elastic.system.clock import Clock


class Rehearsals:
    """On rank 0, which decides for all ranks. To be made before the state is restored."""

    def __init__(self, every: Every, order: SampleOrder, events: Path, recipe: str, clock: Clock) -> None:
        self._every = every
        self._clock = clock
        self._epoch_end = next(step for step in range(1, order.steps + 1) if order.ends_epoch(step))
        done = [each.event for each in read_rare(events, RehearsedEvent)]
        overlapped = [each.event for each in read_rare(events, Overlapped)]
        found = [_as_rehearsed(each) for each in done if each.recipe == recipe]
        found += [_as_rehearsed(each) for each in overlapped if each.recipe == recipe]
        self._before = sorted(found, key=lambda each: each.step)
        self._from = 1 + max((each.step for each in found), default=0)  # none is due before this step
        now_s = clock.wall()
        started = [each.time for each in read_rare(events, GenerationStarted)]
        self._start_s = now_s - max(started, default=now_s)
        self._began_s = min((each.time for each in read_rare(events, RunStarted)), default=now_s)

    def is_due(self, step: int) -> bool:
        """Asked in each step."""
        if step < self._from:
            return False
        last = self._before[-1] if self._before else None
        if self._every.kind == "steps":
            return step % int(self._every.value) == 0
        return is_due(
            step,
            epoch_end=self._epoch_end,
            before=self._before,
            cost_s=self._start_s if last is None else last.seconds,
            trained_s=self._clock.wall() - self._began_s,
        )

    def asked(self, step: int) -> None:
        """All ranks know of it. It may find no room: the next one is not due at once."""
        self._from = 2 * step

    @property
    def deals_anew(self) -> bool:
        """Whether the next one has other ranks compute the shards: in turns."""
        return len(self._before) % 2 == 0

    def compared(self, done: RehearsedEvent | Overlapped) -> None:
        self._before.append(_as_rehearsed(done))
        self._from = done.step + 1


def _as_rehearsed(done: RehearsedEvent | Overlapped) -> Rehearsed:
    return Rehearsed(step=done.step, seconds=done.seconds)
