"""The only door to time: no other module of the package reads a clock or sleeps.

Decisions take `now` as an argument. Loops take a Clock, so that a test can move it. Waiting for a
socket, a lock or a process with a timeout is no sleep. The one exception is `faults/pause.py`, a
script that runs without this package while the process that it paused stands still.
"""

import time
from contextlib import suppress
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds on a clock that never jumps; comparable within one process only."""

    def wall(self) -> float:
        """Seconds since 1970; for people and records.

        No decision reads it but one: whether a file that the loop reads is named, because an
        earlier step wrote it (train/files_read.py).
        """

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)


def since_boot_s() -> float:
    """Seconds on a clock that all processes of this machine share and that only goes forward.

    It goes on while a process is stopped and while the machine sleeps.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def processor_s() -> float:
    """Seconds of processor time that this process has used."""
    return time.process_time()


def time_of_day(wall_s: float) -> str:
    """Local time as 23:59:59; "?" for a time that no calendar has."""
    with suppress(OverflowError, ValueError, OSError):
        return time.strftime("%H:%M:%S", time.localtime(wall_s))
    return "?"


def timestamp(wall_s: float) -> str:
    """Local time as 20250131-235959, for names of files."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(wall_s))
