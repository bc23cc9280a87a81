"""A worker that hangs writes the stacks of its threads into its log, within a second or not at all.

The worker registers faulthandler for SIGQUIT (worker/main.py), which writes the stacks from C,
so it works even if the main thread never returns to Python code. A worker that has not registered
it yet is ended by the signal, which does no harm: it is about to be killed anyway. Linux only.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

from elastic.system.clock import Clock
from elastic.system.growing_file import read_from, size_bytes
from elastic.system.processes import is_stopped, signal_main_thread

ANSWER_LIMIT_S = 1.0
POLL_EVERY_S = 0.01
QUIET_POLLS = 5  # a dump that has not grown for so many polls is complete: faulthandler marks no end
OPENING = "most recent call first"  # in the first line of every thread's stack
DUMP_LIMIT_BYTES = 64 * 1024


def dump_stacks(pid: int, log: Path, clock: Clock) -> str:
    """Signal the process, which writes to `log`; returns its stacks.

    Empty if none came in time, or the log cannot be read: there is none if the disk was full.
    """
    start = size_bytes(log)
    was_stopped = is_stopped(pid)
    with suppress(ProcessLookupError):
        # The handler runs in the thread that takes the signal. Another thread would dump all stacks
        # while the main thread goes on, and show the main thread where it is not stuck.
        signal_main_thread(pid, signal.SIGQUIT)
        if was_stopped:
            # A stopped process handles the signal only once it is continued.
            os.kill(pid, signal.SIGCONT)
    deadline = clock.monotonic() + ANSWER_LIMIT_S
    dump, quiet = "", 0
    while clock.monotonic() < deadline and quiet < QUIET_POLLS:
        clock.sleep(POLL_EVERY_S)
        now = read_from(log, start, DUMP_LIMIT_BYTES).decode(errors="replace")
        quiet = quiet + 1 if now == dump and OPENING in now else 0
        dump = now
    return dump if OPENING in dump else ""
