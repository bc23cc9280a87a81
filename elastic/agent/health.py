"""Other threads may ask an agent whether its loop turns, and whether it is in a generation.

The loop notes that it turns, and never waits for those that ask.
"""

from elastic.system.clock import Clock

# Far above the longest turn: a request to an object store that hangs takes 15 s.
STANDS_STILL_S = 30.0


class AgentHealth:
    """generation: the number of that which this node is in, None between two of them."""

    def __init__(self, clock: Clock) -> None:
        self.generation: int | None = None
        self._clock = clock
        self._turned_s = clock.monotonic()
        self._has_ended = False

    def turn(self) -> None:
        """The loop, or a wait of the loop, has turned once more."""
        self._turned_s = self._clock.monotonic()

    def end(self) -> None:
        """The node leaves: what follows, the last saves and the report, has limits of its own."""
        self._has_ended, self.generation = True, None

    @property
    def still_s(self) -> float:
        """Seconds since the last turn; 0 once the loop is over."""
        return 0.0 if self._has_ended else max(0.0, self._clock.monotonic() - self._turned_s)

    @property
    def turns(self) -> bool:
        return self.still_s < STANDS_STILL_S
