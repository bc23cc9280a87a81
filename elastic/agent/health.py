"""Other threads may ask an agent whether its loop turns, and whether it is in a generation.

The loop notes that it turns, and never waits for those that ask.
"""

from elastic.system.clock import Clock

# Far above the longest turn: a call to a backend that does not answer takes a few seconds.
STANDS_STILL_S = 20.0


class AgentHealth:
    """generation: the number of that which this node is in, None between two of them."""

    def __init__(self, clock: Clock) -> None:
        self.generation: int | None = None
        self._clock = clock
        self._turned_s: float | None = clock.monotonic()

    def turn(self) -> None:
        """The loop, or a wait of the loop, has turned once more."""
        self._turned_s = self._clock.monotonic()

    def end(self) -> None:
        """The loop is over; what follows, the last saves and the report, has limits of its own."""
        self._turned_s = self.generation = None

    @property
    def still_s(self) -> float:
        """Seconds since the last turn; 0 once the loop is over."""
        turned_s = self._turned_s
        return 0.0 if turned_s is None else max(0.0, self._clock.monotonic() - turned_s)

    @property
    def turns(self) -> bool:
        return self.still_s < STANDS_STILL_S
