"""A worker that hangs is asked where it stands, and the answer is waited for only as long as it comes: a second at most.

The worker writes the stacks of all its threads into its own log (worker/heartbeat.py has it do so at SIGQUIT), even while its main thread never returns to Python.
One that has not come so far is ended by the signal; it is about to be killed anyway. It needs Linux (/proc).
"""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

from elastic.system.clock import Clock
from elastic.system.growing_file import read_from

ANSWER_S = 1.0
LOOK_EVERY_S = 0.01
QUIET_LOOKS = 5  # an answer that has not grown for so many looks is whole
OPENING = "most recent call first"  # every thread's stack begins so
LONGEST_ANSWER_BYTES = 64 * 1024


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process (SIGSTOP, SIGTSTP); one that a debugger holds is not meant."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def ask_for_stacks(pid: int, log: Path, clock: Clock) -> str:
    """What the process, which writes to `log`, answers; empty when nothing came in time."""
    start = log.stat().st_size
    was_stopped = is_stopped(pid)
    with suppress(ProcessLookupError):
        _signal_main_thread(pid, signal.SIGQUIT)
        if was_stopped:  # else the question would wait for as long as it does
            os.kill(pid, signal.SIGCONT)
    deadline = clock.monotonic() + ANSWER_S
    answer, quiet = "", 0
    while clock.monotonic() < deadline and quiet < QUIET_LOOKS:
        clock.sleep(LOOK_EVERY_S)
        now = read_from(log, start, LONGEST_ANSWER_BYTES).decode(errors="replace")
        quiet = quiet + 1 if now == answer and OPENING in now else 0
        answer = now
    return answer if OPENING in answer else ""


def _signal_main_thread(pid: int, number: signal.Signals) -> None:
    """As os.kill, but no other thread takes the signal while the main thread, whose place is asked for, goes on. Raises ProcessLookupError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, pid, int(number)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
