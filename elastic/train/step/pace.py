"""All ranks know how long each of them worked for a step, apart from its waits for the others.

A synchronous step takes every rank as long as the slowest one, so that its duration names none. A
rank's own seconds are those from the end of one end-of-step sum to the beginning of the next, less
the waits in between (heartbeat.py). They ride in that sum, in a place for each rank: no message
more. They are measured by each rank's own clock, and never enter the training state.

It is not exact on a GPU: a host that waits for its own kernels in a sum counts as waiting.
"""

from elastic.system.clock import Clock, SystemClock
from elastic.worker.heartbeat import HeartbeatSender

_SHORTEST_S = 1e-9  # 0 means that a rank has not measured


class Pace:
    """One rank's part, in one generation."""

    def __init__(self, rank: int, world_size: int, heartbeat: HeartbeatSender, clock: Clock | None = None):
        self._rank = rank
        self._world_size = world_size
        self._heartbeat = heartbeat
        self._clock: Clock = clock or SystemClock()
        self._since_s: float | None = None  # the end of the sum before, waits taken off

    def numbers(self) -> list[float]:
        """What this rank adds to the sum: a place for each rank, none where it is alone."""
        if self._world_size == 1:
            return []
        places = [0.0] * self._world_size
        if self._since_s is not None:
            places[self._rank] = max(_SHORTEST_S, self._worked_s() - self._since_s)
        return places

    def read(self, sums: list[float]) -> tuple[float, ...]:
        """Each rank's own seconds, by rank; empty where it is alone, and in the first step."""
        self._since_s = self._worked_s()
        return tuple(sums) if all(sums) else ()

    def _worked_s(self) -> float:
        return self._clock.monotonic() - self._heartbeat.waited_s
