"""A notice that this machine will be taken away leads, within moments, to the drain of a SIGTERM.

One thread looks for a file, and runs a command that asks, for example, the metadata service of a
cloud. Neither can delay training. A notice is not judged: a file that exists, even empty, is one,
and so is a command that exits with 0. A command that cannot be run, or takes too long, is no
notice; that is reported once, and the command is run again.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elastic.system.clock import Clock

POLL_S = 0.04
NOTICE_EVERY_S = 5.0
COMMAND_S = 10.0
END_S = 5.0
_NOT_RUN = (126, 127)  # what a shell exits with when it cannot run a command, or does not find it


class CommandNotice:
    """Runs a shell command every NOTICE_EVERY_S, one at a time, without waiting for it."""

    def __init__(self, command: str, clock: Clock, report: Callable[[str], None]) -> None:
        self.command = command
        self._clock = clock
        self._report = report
        self._is_reported = False
        self._started_s = -NOTICE_EVERY_S
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no command is running."""
        return self._running is None

    def poll(self) -> bool:
        age_s = self._clock.monotonic() - self._started_s
        if self._running is None:
            if age_s >= NOTICE_EVERY_S:
                self._start()
            return False
        code = self._running.poll()
        if code is not None:
            self._running = None
            if code in _NOT_RUN:
                self._report_once(f"it exits with {code}")
        elif age_s > COMMAND_S:
            self.close()
            self._report_once(f"it takes longer than {COMMAND_S:g} s")
        return code == 0

    def close(self) -> None:
        """Kill the running command, with everything that it started."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
            self._running = None

    def _start(self) -> None:
        self._started_s = self._clock.monotonic()
        try:
            self._running = subprocess.Popen(
                ["/bin/sh", "-c", self.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._report_once(str(error))

    def _report_once(self, what: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._report(
                f"the command for notices, {self.command!r}, gives no answer ({what}); it is tried again"
            )


@contextmanager
def open_notices(
    file: str | None,
    command: str | None,
    leave: Callable[[str], None],
    clock: Clock,
    report: Callable[[str], None],
) -> Iterator[None]:
    """While the context is open, the first notice calls `leave` with its reason, from a thread.

    file: a path that appears. command: for a shell. Where both are None, nothing is started.
    """
    if file is None and command is None:
        yield
        return
    asked = None if command is None else CommandNotice(command, clock, report)
    is_over = threading.Event()
    args = file, asked, leave, is_over.wait
    thread = threading.Thread(target=_watch, args=args, name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        # A file system that does not answer may hold the thread, which then ends with the process.
        thread.join(END_S)


def _watch(
    file: str | None,
    command: CommandNotice | None,
    leave: Callable[[str], None],
    is_over: Callable[[float], bool],
) -> None:
    try:
        while not is_over(POLL_S):
            came = None
            if file is not None and os.path.exists(file):  # noqa: PTH110 - Path.exists raises where the folder may not be read
                came = file
            elif command is not None and command.poll():
                came = command.command
            if came is not None:
                leave(f"a notice ({came}) asks this node to leave")
                return
    finally:
        if command is not None:
            command.close()
