"""Which steps are audited is a function of steps, seconds and measured costs.

`--audit auto` audits the second step of a process, to learn what an audit costs, and from then on
whenever all audits of the process together, with the next one, cost at most one percent of its
steps' time. The first step is left alone, since after a fault it is waited for. `--audit Nsteps`
audits each step whose number N divides.

What an audit costs is what the audit has measured, or what its step took longer than others where
that is more: an audited step also waits for other ranks, and looks at what the function changes.
"""

from collections import deque
from statistics import fmean, median

from elastic.config.durations import Every
from elastic.train.schedule import MEASUREMENTS

SHARE = 0.01


class AuditSchedule:
    """What audits have cost. Rank 0 has one and decides for all ranks."""

    def __init__(self, every: Every) -> None:
        """Raises ValueError for an interval in seconds, by which no two runs would audit alike."""
        if every.kind == "seconds":
            raise ValueError(f"expected steps between audits, auto or off, found {every}")
        self._every = every
        self._costs: deque[float] = deque(maxlen=MEASUREMENTS)
        self._steps: deque[float] = deque(maxlen=MEASUREMENTS)  # without an audit
        self._begun = 0
        self._elapsed_s = 0.0

    def is_due(self, step: int, *, is_first: bool = False) -> bool:
        """Asked while the step before is under way. is_first: of this process."""
        match self._every.kind:
            case "steps":
                return step % int(self._every.value) == 0
            case "auto":
                return not is_first and self._is_affordable()
            case _:
                return False

    def _is_affordable(self) -> bool:
        if not self._costs:  # the first one's is perhaps not known yet
            return self._begun == 0
        return (self._begun + 1) * fmean(self._costs) <= SHARE * self._elapsed_s

    def begin(self) -> None:
        """An audited step begins."""
        self._begun += 1

    def add_step(self, seconds: float, audit_s: float | None = None) -> None:
        """A step took so long. audit_s: of that, what its audit has measured, if it had one."""
        self._elapsed_s += seconds
        if audit_s is None:
            self._steps.append(seconds)
            return
        longer_s = seconds - median(self._steps) if self._steps else 0.0
        self._costs.append(max(audit_s, longer_s))
