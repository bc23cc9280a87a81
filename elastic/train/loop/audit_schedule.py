"""Which steps are audited is a function of steps, seconds and measured costs.

`--audit auto` audits the second step of a process, to learn what an audit costs, and from then on
whenever all audits of the process together, with the next one, cost at most one percent of its
steps' time. They are spread evenly, also after a step that took long (an evaluation in the loop's
body), and the first step of a process does not count, which builds and loads much. It is not
audited, since after a fault it is waited for. `--audit Nsteps`
audits each step whose number N divides.

What an audit costs is what the audit has measured, or what its step took longer than others where
that is more: an audited step also waits for other ranks, and looks at what the function changes.
"""

from collections import deque
from statistics import fmean, median

from elastic.config.durations import Every
from elastic.train.loop.schedule import MEASUREMENTS, affordable_interval

SHARE = 0.01


class AuditSchedule:
    """What audits have cost. Rank 0 has one and decides for all ranks."""

    def __init__(self, every: Every) -> None:
        """Raises ValueError for an interval in seconds, by which no two runs would audit alike."""
        if every.kind == "seconds":
            raise ValueError(f"expected steps between audits, auto or off, found {every}")
        self._every = every
        # The seconds of audited steps, and what of them the audits have measured.
        self._audited: deque[tuple[float, float]] = deque(maxlen=MEASUREMENTS)
        self._steps: deque[float] = deque(maxlen=MEASUREMENTS)  # without an audit
        self._begun = 0
        self._last: int | None = None
        self._is_first = True
        self._elapsed_s = 0.0

    def is_due(self, step: int, *, is_first: bool = False) -> bool:
        """Asked while the step before is under way. is_first: of this process."""
        match self._every.kind:
            case "steps":
                return step % int(self._every.value) == 0
            case "auto":
                return not is_first and self._is_affordable(step)
            case _:
                return False

    def _is_affordable(self, step: int) -> bool:
        if self._last is None:
            return True
        if not self._audited or not self._steps:  # what the first one cost is not known yet
            return False
        step_s = median(self._steps)
        cost_s = fmean(max(audit_s, seconds - step_s) for seconds, audit_s in self._audited)
        is_over = step - self._last >= affordable_interval(cost_s, step_s, share=SHARE)
        return is_over and (self._begun + 1) * cost_s <= SHARE * self._elapsed_s

    def begin(self, step: int) -> None:
        """The audited step `step` begins."""
        self._last = step
        self._begun += 1

    def add_step(self, seconds: float, audit_s: float | None = None) -> None:
        """A step took so long. audit_s: of that, what its audit has measured, if it had one."""
        if self._is_first and audit_s is None:
            self._is_first = False
            return
        self._elapsed_s += seconds
        if audit_s is None:
            self._steps.append(seconds)
            return
        self._audited.append((seconds, audit_s))
