"""A node that was asked to leave gives each task its share of one grace, and waits for none longer.

Threads and signal handlers may request it at any time: a request only sets values. What it leads to
is decided in decide.py; the supervisor ends what outlives the grace (system/supervisor.py).
"""

import signal
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import suppress
from math import inf
from typing import TypeVar

from elastic.errors import EXIT_FAILED, EXIT_INTERRUPTED
from elastic.system.clock import Clock
from elastic.system.leave_deadline import LeavePage, Share

LOOK_S = 0.05
SHORTEST_S = 0.25  # of a task for which no time is left: a quick answer still counts
T = TypeVar("T")


class GivenUp(Exception):  # noqa: N818 - as in errors.py
    """A call did not return within its share of the grace; nothing waits for its thread."""


class ShutdownRequest:
    """`reason` is None until the first request."""

    def __init__(self, page: LeavePage, clock: Clock) -> None:
        self._page, self.grace_s = page, page.grace_s
        self._clock = clock
        self._calls = ThreadPoolExecutor(1)  # whose thread nothing waits for: the command ends by os._exit
        self.saved_step = 0  # the newest that is known to be committed; 0 for none

    @property
    def reason(self) -> str | None:
        return self._page.reason

    def on_signal(self, number: int, _frame: object) -> None:
        """A handler for what the supervisor passes on, and for what this process gets itself."""
        self.request(f"{signal.Signals(number).name} asks this node to leave")

    def request(self, reason: str) -> None:
        if self.reason is None:
            self._page.noticed(reason, self._clock.monotonic())

    def until_s(self, share: Share) -> float:
        """When a task is given up, on the monotonic clock; infinite before the first request."""
        return self._page.deadline.until_s(share)

    def is_over(self, share: Share) -> bool:
        return self._clock.monotonic() >= self.until_s(share)

    def end_s(self, share: Share, began_s: float, longest_s: float = inf) -> float:
        """When a task that began then is given up: after `longest_s`, or with its share."""
        return max(began_s + SHORTEST_S, min(began_s + longest_s, self.until_s(share)))

    def left_s(self, share: Share, longest_s: float) -> float:
        """Of a task that begins now."""
        now_s = self._clock.monotonic()
        return self.end_s(share, now_s, longest_s) - now_s

    def within(
        self, share: Share, call: Callable[[], T], *, longest_s: float = inf, calls: Executor | None = None
    ) -> T:
        """The answer of a call that cannot be interrupted. Raises what it raises, and GivenUp.

        calls: runs it after those before.
        """
        began_s = self._clock.monotonic()
        answer = (calls or self._calls).submit(call)
        while not wait([answer], LOOK_S).done:
            if self._clock.monotonic() >= self.end_s(share, began_s, longest_s):
                if calls is None:
                    self._calls = ThreadPoolExecutor(1)  # for the next call
                raise GivenUp
        return answer.result()

    def tidy(self, call: Callable[[], object]) -> None:
        """One of the last tasks, on whose end nothing depends."""
        with suppress(GivenUp):
            self.within(Share.REPORT, call)

    def begins(self) -> None:
        """Workers are started. What was saved before may be what they pass over as damaged."""
        self.saved_step = 0
        self._page.would_end(EXIT_FAILED)

    def saved(self, step: int) -> None:
        """It is known to be committed."""
        self.saved_step = max(step, self.saved_step)

    def ends(self, last_step: int) -> None:
        """No worker runs any more, and no save. last_step: that was trained, as far as this node
        knows.
        """
        if last_step <= self.saved_step:
            self._page.would_end(EXIT_INTERRUPTED)

    def decided(self, code: int) -> None:
        """What follows does not change the exit code."""
        self._page.would_end(code)
