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

import mmap
import signal
from dataclasses import dataclass
from enum import Enum
from math import inf

OVERTIME_S = 3.0  # beyond the grace, for processes that have only to exit, until they are killed
MOST_SIGNALS = 3
SAME_SIGTERM_S = 0.5
_SIZE_BYTES, _TEXT_AT, _TEXT_BYTES = 4096, 512, 1024
# Words of 64 bits. 0.0 is a time that has not come yet.
_NUMBER, _WARNED, _TERMINATED, _FIRST_SIGNAL = 0, 1, 2, 3  # of the supervisor
_NOTICED, _STAGE, _LAST_STEP, _SAVED_STEP, _CODE = 8, 9, 10, 11, 12  # of the agent
_REASON, _WAITS_FOR = 0, 1


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
        """When the rest of the node is killed."""
        return self.ends_s + (OVERTIME_S if len(self.signalled_s) < MOST_SIGNALS else 0.0)

    def until_s(self, share: Share) -> float:
        """When a task is given up; infinite without a request."""
        if self.asked_s is None:
            return inf
        since_s = min(self.ends_s, max((self.asked_s, *self.signalled_s[1:2])))
        return since_s + share.value * (self.ends_s - since_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the agent knows of its training.

    has_begun: workers were started. is_over: none runs any more. last_step: the last that was
    trained, as far as the agent knows; saved_step: the newest that is known to be committed. code:
    the exit code, once it is decided.
    """

    has_begun: bool
    is_over: bool
    last_step: int
    saved_step: int
    code: int | None


class LeavePage:
    def __init__(self, grace_s: float) -> None:
        """grace_s: the whole grace. A child that is forked afterwards shares the page."""
        self.grace_s = grace_s
        self._page = mmap.mmap(-1, _SIZE_BYTES)
        self._words = memoryview(self._page)[:_TEXT_AT].cast("d")

    # Of the supervisor.

    def signalled(self, number: int, now_s: float) -> None:
        """A signal asks for the end.

        A SIGTERM right behind another is the same one: srun passes on what Slurm sends to its step
        as well.
        """
        if number == signal.SIGTERM:
            before_s = self._words[_TERMINATED]
            if before_s and now_s - before_s < SAME_SIGTERM_S:
                return
            self._words[_TERMINATED] = now_s
        count = len(self.deadline.signalled_s)
        if count < MOST_SIGNALS:
            self._asked_by(number)
            self._words[_FIRST_SIGNAL + count] = now_s

    def warned(self, number: int, now_s: float) -> None:
        """A scheduler may send a warning, or several, and later its SIGTERM, which does not say
        that leaving takes too long: a warning shortens nothing.
        """
        if not self._words[_WARNED]:
            self._asked_by(number)
            self._words[_WARNED] = now_s

    def _asked_by(self, number: int) -> None:
        self._words[_NUMBER] = self._words[_NUMBER] or number

    # Of the agent.

    def noticed(self, reason: str, now_s: float) -> None:
        """A reason that is no signal asks this node to leave."""
        if not self._words[_NOTICED]:
            self._write(_REASON, reason)
            self._words[_NOTICED] = now_s

    def waits_for(self, task: str) -> None:
        """A noun for what the agent does from now on; empty for nothing special."""
        self._write(_WAITS_FOR, task)

    def tell(self, standing: Standing) -> None:
        self._words[_LAST_STEP], self._words[_SAVED_STEP] = standing.last_step, standing.saved_step
        self._words[_CODE] = -1.0 if standing.code is None else standing.code
        # Last: a reader that sees that the training is over sees its last step as well.
        self._words[_STAGE] = standing.has_begun + standing.is_over

    # For both.

    @property
    def deadline(self) -> LeaveDeadline:
        words = self._words
        signals = (words[_FIRST_SIGNAL + i] for i in range(MOST_SIGNALS))
        noticed_s = min((time for time in (words[_NOTICED], words[_WARNED]) if time), default=None)
        return LeaveDeadline(
            grace_s=self.grace_s, noticed_s=noticed_s, signalled_s=tuple(time for time in signals if time)
        )

    @property
    def reason(self) -> str | None:
        """Why the first request came; None before it."""
        words, asked_s = self._words, self.deadline.asked_s
        if asked_s is None:
            return None
        if words[_NOTICED] == asked_s:
            return self._read(_REASON)
        return f"{signal.Signals(int(words[_NUMBER])).name} asks this node to leave"

    @property
    def task(self) -> str:
        return self._read(_WAITS_FOR)

    @property
    def standing(self) -> Standing:
        words, stage = self._words, self._words[_STAGE]
        return Standing(
            has_begun=stage >= 1,
            is_over=stage >= 2,
            last_step=int(words[_LAST_STEP]),
            saved_step=int(words[_SAVED_STEP]),
            code=int(words[_CODE]) if stage and words[_CODE] >= 0 else None,
        )

    def _write(self, place: int, text: str) -> None:
        at = _TEXT_AT + place * _TEXT_BYTES
        self._page[at : at + _TEXT_BYTES] = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")

    def _read(self, place: int) -> str:
        at = _TEXT_AT + place * _TEXT_BYTES
        return self._page[at : at + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
