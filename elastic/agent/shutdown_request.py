"""A node that was asked to leave has its grace for that and no longer, whoever asked, and of several reasons the first counts.

It may be asked from signal handlers and from any thread. What a request leads to is decided in decide.py.
"""

import signal

from elastic.system.clock import Clock

SHORTEST_LIMIT_S = 1.0  # beyond the grace, for processes that have nothing left to do to end
SIGNALS_TO_STOP = 3  # the first asks for a drain, the second for an end without one, the third for an end without a checkpoint


class ShutdownRequest:
    """`reason` is None until somebody asks."""

    def __init__(self, grace_s: float, clock: Clock) -> None:
        self.reason: str | None = None
        self.grace_s = grace_s
        self._clock = clock
        self._since_s = 0.0
        self._signals = 0

    def on_signal(self, number: int, _frame: object) -> None:
        """Signal handler."""
        self._signals += 1
        self.request(f"{signal.Signals(number).name} asks this node to leave")

    def request(self, reason: str) -> None:
        if self.reason is None:
            self._since_s = self._clock.monotonic()
            self.reason = reason

    @property
    def is_requested(self) -> bool:
        return self.reason is not None

    @property
    def skips_drain(self) -> bool:
        """Nobody waits for a drain any more."""
        return self._signals > 1

    @property
    def skips_checkpoint(self) -> bool:
        """Nor for a checkpoint."""
        return self._signals >= SIGNALS_TO_STOP

    @property
    def age_s(self) -> float:
        """Seconds since it was asked; of no meaning before."""
        return self._clock.monotonic() - self._since_s

    @property
    def deadline_s(self) -> float:
        """When the grace ends, on the monotonic clock; a node that goes without having been asked has all of it from now on."""
        return (self._since_s if self.is_requested else self._clock.monotonic()) + self.grace_s

    def limit_s(self, longest_s: float) -> float:
        """How long what is left to do may take: `longest_s`, or what is left of the grace of a node that was asked."""
        if not self.is_requested:
            return longest_s
        left_s = 0.0 if self.skips_checkpoint else self.grace_s - self.age_s
        return max(SHORTEST_LIMIT_S, min(longest_s, left_s))
