"""Which steps are audited is a function of steps, seconds and measured costs.

`--audit auto` audits the second step of a process, to learn what an audit costs, and from then on
as often as one percent of the steps' time allows. The first step is left alone, since after a fault
it is waited for. `--audit Nsteps` audits each step whose number N divides.
"""

from collections import deque
from statistics import median

from elastic.config.durations import Every
from elastic.train.schedule import MEASUREMENTS, affordable_interval


class AuditSchedule:
    """The interval in force. Rank 0 has one and decides for all ranks."""

    def __init__(self, every: Every) -> None:
        self._every = every
        self._costs: deque[float] = deque(maxlen=MEASUREMENTS)
        self._steps: deque[float] = deque(maxlen=MEASUREMENTS)
        self._last: int | None = None
        self._interval = 1

    def is_due(self, step: int, *, is_first: bool = False) -> bool:
        """Asked while the step before is under way. is_first: of this process."""
        match self._every.kind:
            case "steps":
                return step % int(self._every.value) == 0
            case "auto":
                is_over = self._last is None or (self._costs and step - self._last >= self._interval)
                return not is_first and bool(is_over)
            case "off" | "seconds":
                return False

    def begin(self, step: int) -> None:
        """The audited step `step` begins."""
        self._last = step

    def add_step(self, seconds: float) -> None:
        """A step took so long, with its audit if it had one."""
        self._steps.append(seconds)

    def add_audit(self, cost_s: float) -> None:
        """The audit of the last step cost training so long."""
        self._costs.append(cost_s)
        current = self._interval if len(self._costs) > 1 else None
        # The shares are the same, one percent.
        self._interval = affordable_interval(median(self._costs), median(self._steps), current)
