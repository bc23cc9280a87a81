"""From the first request to leave there is one moment by which this node has left.

It is a function of the times of the requests: the first one begins the grace period, and a second
Ctrl-C ends it. Each task of leaving has its share of the grace, after which it is given up, so that
the next task has time. It does not promise that a task ends when it is given up: what a system call
holds is killed with its process (supervisor.py).

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
SAME_CTRL_C_S = 0.5
_TEXT_BYTES = 1024


class _Words(ctypes.Structure):
    """Words of 64 bits, and a text. 0.0 is a time that has not come yet; the code is one more."""

    _fields_ = (
        # Of the supervisor.
        ("number", ctypes.c_int64),
        ("signalled_s", ctypes.c_double),
        ("interrupted_s", ctypes.c_double),
        ("forced_s", ctypes.c_double),
        # Of the agent.
        ("noticed_s", ctypes.c_double),
        ("code", ctypes.c_int64),
        ("reason", ctypes.c_char * _TEXT_BYTES),
    )


class Share(Enum):
    """The part of the grace that is over when a task is given up."""

    JOIN = 0.4  # a node that has not all parts of its state is in the next generation
    DRAIN = 0.5  # the workers finish their step, or end by themselves
    GROUP = 0.75  # the other nodes are told
    SAVE = 0.88  # a checkpoint holds the newest state
    REPORT = 1.0  # the newest checkpoint is looked up; the last events and lines are written


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveDeadline:
    """Times are seconds on the monotonic clock, and infinite while they have not come.

    asked_s: of the first request to leave. forced_s: of a second Ctrl-C.
    """

    grace_s: float
    asked_s: float = inf
    forced_s: float = inf

    @property
    def killed_s(self) -> float:
        """When the rest of the node is killed."""
        return min(self.asked_s + self.grace_s + OVERTIME_S, self.forced_s)

    def until_s(self, share: Share) -> float:
        """When a task is given up."""
        return min(self.asked_s + share.value * self.grace_s, self.forced_s)


class LeavePage:
    def __init__(self, grace_s: float) -> None:
        """grace_s: the whole grace. A child that is forked afterwards shares the page."""
        self.grace_s = grace_s
        self._words = _Words.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Words)))

    # Of the supervisor.

    def signalled(self, number: int, now_s: float) -> None:
        """A signal asks this node to leave.

        None but Ctrl-C shortens the grace: a scheduler may send a warning, or several, and later
        its SIGTERM, which does not say that leaving takes too long. A Ctrl-C right behind another
        is the same one: programs such as uv pass on what the terminal has sent to all.
        """
        words = self._words
        if not words.signalled_s:
            words.number, words.signalled_s = number, now_s
        if number == signal.SIGINT:
            if words.interrupted_s and now_s - words.interrupted_s >= SAME_CTRL_C_S:
                words.forced_s = words.forced_s or now_s
            words.interrupted_s = words.interrupted_s or now_s

    # Of the agent.

    def noticed(self, reason: str, now_s: float) -> None:
        """A reason that is no signal asks this node to leave."""
        if not self._words.noticed_s:
            self._words.reason = reason.encode(errors="replace")[: _TEXT_BYTES - 1]
            self._words.noticed_s = now_s

    def would_end(self, code: int) -> None:
        """The exit code if the agent is killed from now on."""
        self._words.code = code + 1

    # For both.

    @property
    def deadline(self) -> LeaveDeadline:
        words = self._words
        asked_s = min((time for time in (words.signalled_s, words.noticed_s) if time), default=inf)
        return LeaveDeadline(grace_s=self.grace_s, asked_s=asked_s, forced_s=words.forced_s or inf)

    @property
    def number(self) -> int:
        """Of the first signal; 0 before it."""
        return int(self._words.number)

    @property
    def reason(self) -> str | None:
        """Why the first request came; None before it."""
        words, asked_s = self._words, self.deadline.asked_s
        if asked_s == inf:
            return None
        if words.noticed_s == asked_s:
            return str(words.reason, errors="replace")
        return f"{signal.Signals(self.number).name} asks this node to leave"

    @property
    def code(self) -> int | None:
        """None before workers were started."""
        return self._words.code - 1 if self._words.code else None
