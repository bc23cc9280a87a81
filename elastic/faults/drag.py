"""From a strike on each step of this process takes a given number of times as long, by waiting before its first forward pass.

As long as the shortest step that it has seen, and not the last: ranks that slow each other down would never stop growing slower. What it computes stays the same.
"""

from math import inf

from elastic.faults.plan import Slow
from elastic.system.clock import Clock


class Drag:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._step = 0
        self._began_s: float | None = None
        self._shortest_s = inf
        self._factor = 1.0
        self._until: float = 0

    def begin(self, step: int) -> None:
        """At a step's first forward pass, and perhaps again at its later ones."""
        if step == self._step:
            return
        self._step = step
        if self._began_s is not None:
            self._shortest_s = min(self._shortest_s, self._clock.monotonic() - self._began_s)
        if step <= self._until:
            self._clock.sleep((self._factor - 1) * self._shortest_s)
        self._began_s = self._clock.monotonic()

    def slow(self, deed: Slow) -> None:
        """From the next step on."""
        self._factor = deed.factor
        self._until = inf if deed.steps is None else self._step + deed.steps
