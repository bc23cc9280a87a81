"""From the first request to leave there is one moment by which this node has left.

It is a function of the times of the requests: the first one begins the grace period, a second
signal halves what is left of it, and a third one ends it. Each task of leaving has its share of the
grace, after which it is given up, so that the next task has time. It does not promise that a task
ends when it is given up: what a system call holds is killed with its process (supervisor.py).
"""

from dataclasses import dataclass
from enum import Enum
from math import inf

OVERTIME_S = 3.0  # beyond the grace, for processes that have only to exit, until they are killed
MOST_SIGNALS = 3


class Share(Enum):
    """The part of the grace that is over when a task is given up."""

    DRAIN = 0.5  # the workers finish their step, or end by themselves
    REDO = 0.7  # new workers have done the steps again that these kept nowhere
    GROUP = 0.75  # the other nodes are told
    SAVE = 0.88  # a checkpoint holds the newest state
    REPORT = 1.0  # the newest checkpoint is looked up; the last events and lines are written


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveDeadline:
    """Times are seconds on the monotonic clock.

    noticed_s: of the first notice or warning, which shortens no grace; None for none. signalled_s:
    of the signals that ask for the end, three at most.
    """

    grace_s: float
    noticed_s: float | None = None
    signalled_s: tuple[float, ...] = ()

    @property
    def asked_s(self) -> float | None:
        """When the node was first asked to leave; None while it was not."""
        found = (*self.signalled_s[:1], *(() if self.noticed_s is None else (self.noticed_s,)))
        return min(found, default=None)

    @property
    def ends_s(self) -> float:
        """The end of the grace; infinite without a request."""
        if self.asked_s is None:
            return inf
        end_s = self.asked_s + self.grace_s
        for second_s in self.signalled_s[1:2]:
            end_s = min(end_s, (second_s + end_s) / 2)
        return min(end_s, *self.signalled_s[2:3], inf)

    @property
    def killed_s(self) -> float:
        """When what is left of the node is killed."""
        return self.ends_s + (OVERTIME_S if len(self.signalled_s) < MOST_SIGNALS else 0.0)

    def until_s(self, share: Share) -> float:
        """When a task is given up; infinite without a request."""
        if self.asked_s is None:
            return inf
        since_s = min(self.ends_s, max((self.asked_s, *self.signalled_s[1:2])))
        return since_s + share.value * (self.ends_s - since_s)
