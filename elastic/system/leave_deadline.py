"""From the first request to leave there is one moment by which this node has left.

It is a function of the times of the requests: the first one begins the grace period, a second
signal halves the rest of it, and a third one ends it. Each task of leaving has its share of the
grace, after which it is given up, so that the next task has time. It does not promise that a task
ends when it is given up: what a system call holds is killed with its process (supervisor.py).

The supervisor and its agent know the same of it, also where one of them hangs: a page of memory
that both share. Each word has one writer and is read whole, old or new: the supervisor writes when
signals came, the agent all else. That is enough for the supervisor to say how the node has left
when the agent cannot.
"""

import ctypes
import mmap
import signal
from dataclasses import dataclass
from enum import Enum
from math import inf

OVERTIME_S = 3.0  # beyond the grace, for processes that have only to exit, until they are killed
MOST_SIGNALS = 3
SAME_SIGTERM_S = 0.5
_TEXT_BYTES = 1024


class _Words(ctypes.Structure):
    """Words of 64 bits, and texts. 0.0 is a time that has not come yet; the code is one more."""

    _fields_ = (
        # Of the supervisor.
        ("number", ctypes.c_int64),
        ("warned_s", ctypes.c_double),
        ("terminated_s", ctypes.c_double),
        ("signalled_s", ctypes.c_double * MOST_SIGNALS),
        # Of the agent.
        ("noticed_s", ctypes.c_double),
        ("code", ctypes.c_int64),
        ("reason", ctypes.c_char * _TEXT_BYTES),
        ("task", ctypes.c_char * _TEXT_BYTES),
    )


class Share(Enum):
    """The part of the grace that is over when a task is given up."""

    DRAIN = 0.5  # the workers finish their step, or end by themselves
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
        """When the rest of the node is killed."""
        return self.ends_s + (OVERTIME_S if len(self.signalled_s) < MOST_SIGNALS else 0.0)

    def until_s(self, share: Share) -> float:
        """When a task is given up; infinite without a request."""
        if self.asked_s is None:
            return inf
        since_s = min(self.ends_s, max((self.asked_s, *self.signalled_s[1:2])))
        return since_s + share.value * (self.ends_s - since_s)


class LeavePage:
    def __init__(self, grace_s: float) -> None:
        """grace_s: the whole grace. A child that is forked afterwards shares the page."""
        self.grace_s = grace_s
        self._words = _Words.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Words)))

    # Of the supervisor.

    def signalled(self, number: int, now_s: float) -> None:
        """A signal asks for the end.

        A SIGTERM right behind another is the same one: srun passes on what Slurm sends to its step
        as well.
        """
        words, count = self._words, len(self.deadline.signalled_s)
        if number == signal.SIGTERM:
            if words.terminated_s and now_s - words.terminated_s < SAME_SIGTERM_S:
                return
            words.terminated_s = now_s
        if count < MOST_SIGNALS:
            words.number = words.number or number
            words.signalled_s[count] = now_s

    def warned(self, number: int, now_s: float) -> None:
        """A scheduler may send a warning, or several, and later its SIGTERM, which does not say
        that leaving takes too long: a warning shortens nothing.
        """
        if not self._words.warned_s:
            self._words.number = self._words.number or number
            self._words.warned_s = now_s

    # Of the agent.

    def noticed(self, reason: str, now_s: float) -> None:
        """A reason that is no signal asks this node to leave."""
        if not self._words.noticed_s:
            self._words.reason = _text(reason)
            self._words.noticed_s = now_s

    def waits_for(self, task: str) -> None:
        """A noun for what the agent does from now on; empty for nothing special."""
        self._words.task = _text(task)

    def would_end(self, code: int) -> None:
        """The exit code if the agent is killed from now on."""
        self._words.code = code + 1

    # For both.

    @property
    def deadline(self) -> LeaveDeadline:
        words = self._words
        noticed_s = min((time for time in (words.noticed_s, words.warned_s) if time), default=None)
        return LeaveDeadline(
            grace_s=self.grace_s,
            noticed_s=noticed_s,
            signalled_s=tuple(time for time in words.signalled_s if time),
        )

    @property
    def reason(self) -> str | None:
        """Why the first request came; None before it."""
        words, asked_s = self._words, self.deadline.asked_s
        if asked_s is None:
            return None
        if words.noticed_s == asked_s:
            return str(words.reason, errors="replace")
        return f"{signal.Signals(words.number).name} asks this node to leave"

    @property
    def task(self) -> str:
        return str(self._words.task, errors="replace")

    @property
    def code(self) -> int | None:
        """None before workers were started."""
        return self._words.code - 1 if self._words.code else None


def _text(text: str) -> bytes:
    return text.encode()[: _TEXT_BYTES - 1]
