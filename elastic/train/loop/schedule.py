"""When a snapshot, save, comparison or audit is due is a function of steps and measured seconds.

By `auto`, each of them comes as often as its share of the steps' time allows, by the medians of the
last costs and step times: one percent for snapshots and for audits, half a percent for comparisons
of the ranks' states besides those at snapshots. One more snapshot is taken before a step that ends
an epoch, as long as these cost at most one percent besides: its body may evaluate for longer than a
node that is asked to leave can wait, and in the middle of a body there is no state to go on from.

`--save-every auto` saves at Young's interval, sqrt(2 · cost · time between faults) (Young 1974: A
first order approximation to the optimum checkpoint interval; Daly 2006), for a fault every half
hour, which is what preemptible machines see at their worst. A save that costs training w seconds is
then repeated every sqrt(3600 w) seconds.

It reads no clock, and a due snapshot may find no free slot.
"""

import math
from collections import deque
from statistics import median

from elastic.config.durations import Every
from elastic.events import SnapshotInterval

FAULT_EVERY_S = 1800.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 600.0

SNAPSHOT_SHARE = AUDIT_SHARE = 0.01
COMPARISON_SHARE = 0.005
CREDIT_S = 60.0  # a process lasts longer: its first epoch may end after milliseconds
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
        case _:
            return cost_s is None or since_s >= save_interval_s(cost_s)


def affordable_interval(cost_s: float, step_s: float, current: int | None, share: float) -> int:
    """Steps from one snapshot, comparison or audit to the next.

    current: the interval in force, None before the first. It grows at once, since they would cost
    more than their share, and shrinks only where it is much too long.
    """
    wanted = max(1, math.ceil(cost_s / (share * step_s))) if step_s > 0 else 1
    return current if current is not None and wanted <= current <= wanted * HYSTERESIS else wanted


class Interval:
    """Steps between things that together cost a share of the steps' time. Rank 0 decides by it."""

    def __init__(self, share: float, steps: int | None = None) -> None:
        """steps: None where it follows the costs."""
        self.share = share
        self.steps = steps
        self.costs_s: deque[float] = deque(maxlen=MEASUREMENTS)
        self.last: int | None = None

    def is_over(self, step: int) -> bool:
        """Also while no cost is known: the first ones tell it."""
        return self.last is None or self.steps is None or step - self.last >= self.steps

    def begin(self, step: int) -> None:
        """Steps are counted from this one, whether or not its snapshot or save succeeds."""
        self.last = step

    def add_cost(self, cost_s: float, step_s: float) -> None:
        """What one has cost training, and what a step takes."""
        self.costs_s.append(cost_s)
        self.steps = affordable_interval(median(self.costs_s), step_s, self.steps, self.share)


class SnapshotSchedule:
    """When to take a snapshot, and what a step takes. Rank 0 has one and decides for all ranks."""

    def __init__(self, every: Every) -> None:
        self._every = every
        self.interval = Interval(SNAPSHOT_SHARE, int(every.value) or None)
        self._steps: deque[float] = deque(maxlen=MEASUREMENTS)
        self.last_step_s = self._elapsed_s = 0.0
        self._before_evaluations = 0

    def is_due(self, step: int, *, evaluates_next: bool = False) -> bool:
        """Whether the state after `step` gets a snapshot; asked once, while the step is under way.

        The first one of a process does: with `auto`, to learn what it costs. evaluates_next: the
        body of the next step may evaluate, which counts with `auto` alone.
        """
        if self._every.kind == "off":
            return False
        if self.interval.is_over(step):
            return True
        if not evaluates_next or not self.interval.costs_s:
            return False
        cost_s = (self._before_evaluations + 1) * median(self.interval.costs_s)
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

    def add_cost(self, cost_s: float) -> SnapshotInterval | None:
        """A snapshot cost training so long. Returns the new interval if it changed."""
        interval, step_s = self.interval, self.step_s
        if self._every.kind != "auto" or step_s is None:
            return None
        before = interval.steps
        interval.add_cost(cost_s, step_s)
        if interval.steps is None or interval.steps == before:
            return None
        return SnapshotInterval(every=interval.steps, cost_s=median(interval.costs_s), step_s=step_s)


class AuditSchedule:
    """Which steps are audited. Rank 0 has one and decides for all ranks.

    `--audit auto` audits the second step of a process, to learn what an audit costs. The first one,
    which builds and loads much, tells nothing of the time of steps, and after a fault it is waited
    for. `--audit Nsteps` audits each step whose number N divides.

    An audit costs what its step took longer than others: it also waits for other ranks.
    """

    def __init__(self, every: Every) -> None:
        self._every = every
        self.interval = Interval(AUDIT_SHARE)
        self._steps: deque[float] = deque(maxlen=MEASUREMENTS)  # without an audit
        self._is_first = True
        self._audited_s: float | None = None  # of a step whose audit's cost is not known yet

    def is_due(self, step: int, *, is_first: bool = False) -> bool:
        """Asked while the step before is under way. is_first: of this process."""
        interval = self.interval
        match self._every.kind:
            case "steps":
                return step % int(self._every.value) == 0
            case "auto":
                is_known = interval.steps is not None or interval.last is None
                return is_known and not is_first and interval.is_over(step)
            case _:
                return False

    def add_step(self, seconds: float, *, is_audited: bool) -> None:
        """A step took so long."""
        if is_audited:
            self._audited_s = seconds
        elif not self._is_first:
            self._steps.append(seconds)
        self._is_first = False
        if self._audited_s is not None and self._steps:
            step_s = median(self._steps)
            self.interval.add_cost(max(0.0, self._audited_s - step_s), step_s)
            self._audited_s = None
