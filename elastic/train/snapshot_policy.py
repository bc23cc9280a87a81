"""How often a snapshot is taken, as a function of what one costs and how long a step takes: as often as costs at most one percent of the steps' time.

A number of steps that is nearly right stays, so that the interval does not change with every measurement.
"""

import math
from collections import deque
from statistics import median

from elastic.config.durations import Every

SHARE = 0.01
HYSTERESIS = 1.5
MEASUREMENTS = 16


def interval(cost_s: float, step_s: float, now: int | None = None) -> int:
    """Steps from one snapshot to the next; `now` is the interval in force, None before the first."""
    wanted = max(1, math.ceil(cost_s / (SHARE * step_s))) if step_s > 0 else 1
    if now is not None and now / HYSTERESIS <= wanted <= now * HYSTERESIS:
        return now
    return wanted


class SnapshotSchedule:
    """The interval in force; rank 0 has one and decides for all."""

    def __init__(self, every: Every) -> None:
        self._every = every
        self._costs: deque[float] = deque(maxlen=MEASUREMENTS)
        self._steps: deque[float] = deque(maxlen=MEASUREMENTS)
        self._last: int | None = None
        self.steps = int(every.value) or None  # None: not yet known, or never

    @property
    def cost_s(self) -> float:
        return median(self._costs)

    @property
    def step_s(self) -> float:
        return median(self._steps)

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be kept. With `auto` the first of a process is, to learn what it costs."""
        if self._every.kind == "off":
            return False
        return self._last is None or self.steps is None or step - self._last >= self.steps

    def took_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def took_snapshot(self, step: int) -> None:
        """It was asked for, and may not be possible."""
        self._last = step

    def learn(self, cost_s: float) -> bool:
        """What one took; whether the interval is another one now."""
        if self._every.kind != "auto" or not self._steps:
            return False
        self._costs.append(cost_s)
        before, self.steps = self.steps, interval(self.cost_s, self.step_s, self.steps)
        return self.steps != before
