"""The only door to time: decisions take `now` as an argument, and shells ask a Clock for it."""

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds on a clock that never jumps; comparable within one process only."""

    def wall(self) -> float:
        """Seconds since 1970; for people and records, never for decisions."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
