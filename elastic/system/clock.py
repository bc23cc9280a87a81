"""The only door to time: no other module of the package reads a clock or sleeps, and the wall clock
is read once in a command, but to tell the age of a file.

Decisions take `now` as an argument. Loops take a Clock, so that a test can move it. Waiting for a
socket, a lock or a process with a timeout is no sleep.
"""

import time
from contextlib import suppress
from typing import Protocol

_boot_wall_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # read once in each command


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds on a clock that never jumps; comparable within one process only."""

    def wall(self) -> float:
        """Seconds since 1970, for people and records; it goes only forward within a command."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def wall() -> float:
        return _boot_wall_s + since_boot_s()


file_time_s = time.time  # which a file gets that is changed now: that of the wall clock as it is set
processor_s = time.process_time  # used by this process
thread_cpu_s = time.thread_time  # used by this thread, however busy the machine is


def since_boot_s() -> float:
    """Seconds on a clock that all processes of this machine share and that only goes forward.

    It goes on while a process is stopped and while the machine sleeps.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_wall_s() -> float:
    """When this machine booted, in seconds since 1970, by its wall clock as the command began.

    The sum of this and `since_boot_s` is the time of every record of the command. A wall clock that
    is set while a job runs therefore changes no duration.
    """
    return _boot_wall_s


def share_boot_wall_s(of_command: float) -> None:
    """Count from the `boot_wall_s` of the command that started this process."""
    global _boot_wall_s  # noqa: PLW0603 - all clocks of a process show one time
    _boot_wall_s = of_command


def time_of_day(wall_s: float) -> str:
    """Local time as 23:59:59; "?" for a time that no calendar has."""
    with suppress(OverflowError, ValueError, OSError):
        return time.strftime("%H:%M:%S", time.localtime(wall_s))
    return "?"


def timestamp(wall_s: float) -> str:
    """Local time as 20250131-235959, for names of files."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(wall_s))
