"""When a snapshot or a checkpoint is due is a function of steps, seconds and measured costs.

`--snapshot-every auto` takes snapshots as often as one percent of the steps' time allows, by the
medians of the last costs and step times. One more is taken where the body of the next step is
expected to evaluate (EvaluatedSteps), as long as these cost at most one percent besides: an
evaluation may last longer than a node that is asked to leave can wait, and in the middle of a body
there is no state to go on from.

Ranks compare their states at every snapshot, and otherwise as often as half a percent of the steps'
time allows.

`--save-every auto` saves at Young's interval, sqrt(2 · cost · time between faults) (Young 1974: A
first order approximation to the optimum checkpoint interval; Daly 2006), for a fault every half
hour, which is what preemptible machines see at their worst. A save that costs training w seconds is
then repeated every sqrt(3600 w) seconds.

It reads no clock, and it does not promise that what is due is possible: there may be no free slot.
"""

import math
from collections import deque
from statistics import median

from elastic.config.durations import Every
from elastic.events import EvaluationInterval, SnapshotInterval

FAULT_EVERY_S = 1800.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 600.0

SNAPSHOT_SHARE = 0.01
COMPARISON_SHARE = 0.005
CREDIT_S = 60.0  # a process lasts longer: its first evaluation may come after milliseconds
HYSTERESIS = 1.5  # of an interval that could be shorter: it does not follow every measurement
MEASUREMENTS = 16


def save_interval_s(cost_s: float) -> float:
    """Seconds between saves that cost training `cost_s` each."""
    return min(max(math.sqrt(2 * cost_s * FAULT_EVERY_S), MIN_INTERVAL_S), MAX_INTERVAL_S)


def is_save_due(every: Every, *, step: int, since_s: float, cost_s: float | None) -> bool:
    """Whether the state after `step` becomes a checkpoint.

    since_s: seconds since the last save began, or since this generation did. cost_s: what a save
    costs training; None before the first one of a generation. `auto` then saves at once, to learn
    the cost and because a young run has no checkpoint yet.
    """
    match every.kind:
        case "steps":
            return step % int(every.value) == 0
        case "seconds":
            return since_s >= every.value
        case "auto":
            return cost_s is None or since_s >= save_interval_s(cost_s)
        case "off":
            return False


def affordable_interval(
    cost_s: float, step_s: float, current: int | None = None, *, share: float = SNAPSHOT_SHARE
) -> int:
    """Steps from one snapshot, or comparison, to the next.

    current: the interval in force, None before the first. It grows at once, since they would cost
    more than their share, and shrinks only where it is much too long.
    """
    wanted = max(1, math.ceil(cost_s / (share * step_s))) if step_s > 0 else 1
    return current if current is not None and wanted <= current <= wanted * HYSTERESIS else wanted


class SnapshotSchedule:
    """The interval in force. Rank 0 has one and decides for all ranks."""

    def __init__(self, every: Every) -> None:
        self._every = every
        self._costs: deque[float] = deque(maxlen=MEASUREMENTS)
        self._steps: deque[float] = deque(maxlen=MEASUREMENTS)
        self._last: int | None = None
        self._elapsed_s = 0.0
        self._before_evaluations = 0
        self.last_step_s = 0.0
        self.interval = int(every.value) or None  # None: not known yet, or never

    def is_due(self, step: int, *, evaluates_next: bool = False) -> bool:
        """Whether the state after `step` gets a snapshot; asked once, while the step is under way.

        The first one of a process does: with `auto`, to learn what it costs. evaluates_next: the
        body of the next step is expected to evaluate, which counts with `auto` alone.
        """
        if self._every.kind == "off":
            return False
        if self._last is None or self.interval is None or step - self._last >= self.interval:
            return True
        if self._every.kind != "auto" or not evaluates_next or not self._costs:
            return False
        cost_s = (self._before_evaluations + 1) * median(self._costs)
        is_affordable = cost_s <= SNAPSHOT_SHARE * (CREDIT_S + self._elapsed_s)
        self._before_evaluations += is_affordable
        return is_affordable

    def add_step(self, seconds: float) -> None:
        """A step took so long, with all that its body does."""
        self._steps.append(seconds)
        self.last_step_s = seconds
        self._elapsed_s += seconds

    @property
    def step_s(self) -> float | None:
        """The median of the last steps; None before the first."""
        return median(self._steps) if self._steps else None

    def requested(self, step: int) -> None:
        """All ranks tried to take a snapshot after this step, with or without success."""
        self._last = step

    def add_cost(self, cost_s: float) -> SnapshotInterval | None:
        """A snapshot cost training so long. Returns the new interval if it changed."""
        if self._every.kind != "auto" or not self._steps:
            return None
        self._costs.append(cost_s)
        cost_s, step_s = median(self._costs), median(self._steps)
        before, self.interval = self.interval, affordable_interval(cost_s, step_s, self.interval)
        changed = SnapshotInterval(every=self.interval, cost_s=cost_s, step_s=step_s)
        return changed if self.interval != before else None


class EvaluatedSteps:
    """The next step whose body is expected to evaluate, by the ones before. Rank 0 has one.

    Such a step ends an epoch, or follows the last evaluation after as many steps as that one
    followed the evaluation before it, or the run's beginning. The first evaluation that does
    neither is not foreseen.
    """

    def __init__(self) -> None:
        self._last = self._every = 0  # an evaluation that ends an epoch alone is none of these

    def resume(self, step: int, known: EvaluationInterval) -> None:
        """The run goes on after `step`. known: the last interval that the run had."""
        self._every = max(1, known.every)  # a damaged file may say anything
        self._last = step - (step - known.step) % self._every

    def is_expected(self, step: int, *, ends_epoch: bool) -> bool:
        """Asked before the body of the step before has ended, which may evaluate as well."""
        return ends_epoch or step - self._last in (self._every, 2 * self._every)

    def add(self, step: int, *, ends_epoch: bool) -> EvaluationInterval | None:
        """The body of this step evaluates. Returns the new interval if it changed."""
        is_regular = step == self._last + self._every
        if step == self._last or (ends_epoch and not is_regular):
            return None
        self._last, self._every = step, step - self._last
        return None if is_regular else EvaluationInterval(step=step, every=self._every)


class ComparisonSchedule:
    """When ranks compare their states beside snapshots. Rank 0 has one and decides for all."""

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=MEASUREMENTS)
        self._last: int | None = None
        self.interval: int | None = None  # None: not known yet

    def is_due(self, step: int) -> bool:
        """The first comparisons are, to learn what one costs."""
        return self._last is None or self.interval is None or step - self._last >= self.interval

    def compared(self, step: int, cost_s: float | None, step_s: float | None) -> None:
        """Ranks compare their states after this step.

        cost_s: what that alone costs training; None where a snapshot was taken anyway. step_s: what
        a step takes; None while it is not known.
        """
        self._last = step
        if cost_s is not None and step_s is not None:
            self._costs.append(cost_s)
            self.interval = affordable_interval(
                median(self._costs), step_s, self.interval, share=COMPARISON_SHARE
            )
