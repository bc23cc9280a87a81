"""A node that was asked to leave has one grace period, which begins with the first request.

Signal handlers and threads may request it at any time: a request only sets values. What it leads to
is decided in decide.py.
"""

import signal
from math import inf

from elastic.system.clock import Clock

# For what is left to do when the grace is over: processes that are only to exit still get so long.
SHORTEST_LIMIT_S = 1.0
SAME_SIGTERM_S = 0.5
SIGNALS_TO_SKIP_DRAIN = 2
SIGNALS_TO_SKIP_CHECKPOINT = 3


class ShutdownRequest:
    """`reason` is None until the first request."""

    def __init__(self, grace_s: float, clock: Clock) -> None:
        self.reason: str | None = None
        self.grace_s = grace_s
        self._clock = clock
        self._since_s = 0.0
        self._signals = 0
        self._terminated_s = -inf

    def on_signal(self, number: int, _frame: object) -> None:
        """A signal handler.

        The first signal requests a drain, the second ends the wait for it, and the third ends the
        wait for a checkpoint. A SIGTERM right behind another is the same one: srun passes on what
        Slurm sends to its step as well.
        """
        now_s = self._clock.monotonic()
        if number == signal.SIGTERM and now_s - self._terminated_s < SAME_SIGTERM_S:
            return
        if number == signal.SIGTERM:
            self._terminated_s = now_s
        self._signals += 1
        self.on_warning(number, _frame)

    def on_warning(self, number: int, _frame: object) -> None:
        """A signal handler: it requests a drain, and shortens none.

        A scheduler may send a warning, or several, and later its SIGTERM, which does not say that
        the drain takes too long.
        """
        self.request(f"{signal.Signals(number).name} asks this node to leave")

    def request(self, reason: str) -> None:
        if self.reason is None:
            # In this order: a thread that sees the reason reads the time that belongs to it.
            self._since_s = self._clock.monotonic()
            self.reason = reason

    @property
    def skips_drain(self) -> bool:
        return self._signals >= SIGNALS_TO_SKIP_DRAIN

    @property
    def skips_checkpoint(self) -> bool:
        return self._signals >= SIGNALS_TO_SKIP_CHECKPOINT

    @property
    def age_s(self) -> float:
        """Seconds since the request; without meaning before."""
        return self._clock.monotonic() - self._since_s

    @property
    def deadline_s(self) -> float:
        """The end of the grace period on the monotonic clock; without a request it begins now."""
        return (self._clock.monotonic() if self.reason is None else self._since_s) + self.grace_s

    def end_s(self, began_s: float, longest_s: float) -> float:
        """When a last task that began then must end, on the monotonic clock: after `longest_s`, or,
        whenever a request comes, with its grace.
        """
        if self.reason is None:
            return began_s + longest_s
        asked_s = began_s if self.skips_checkpoint else self.deadline_s
        return max(began_s + SHORTEST_LIMIT_S, min(began_s + longest_s, asked_s))
