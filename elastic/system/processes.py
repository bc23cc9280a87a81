"""Facts about processes, and signals to them, that the standard library does not offer.

Linux only (/proc, prctl, tgkill).
"""

import ctypes
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic.errors import EXIT_FAILED

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def thread_count() -> int:
    """Threads of this process, also those that C code started and Python does not know."""
    return len(list(Path("/proc/self/task").iterdir()))


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        # They follow the command's name, which stands in brackets and may contain any character.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP stopped the process; false for one held by a debugger."""
    return _stat(pid)[:1] == [b"T"]


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since the boot; None where there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent dies.

    The setting is lost in a fork and kept in an exec, so every process asks for itself.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        # It died before the kernel knew of our wish, and will not die again.
        os._exit(EXIT_FAILED)


def adopt_orphans() -> None:
    """What a child leaves behind when it dies becomes a child of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(parent: int | None = None) -> set[int]:
    """Pids of a process's children, also of those that ended and were not waited for.

    parent: None for this process.
    """
    wanted = str(os.getpid() if parent is None else parent).encode()
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return {pid for pid in pids if _stat(pid)[1:2] == [wanted]}


def kill_children(keeps: Callable[[int], bool] = lambda pid: False) -> None:
    """SIGKILL to all children but those, and to their orphans, until there are none.

    Call `adopt_orphans` before they are started. It waits for none of them alone: the first process
    of a namespace ends only once each other one in it is reaped, which may be a child as well.
    """
    while left := [pid for pid in children() if not keeps(pid)]:
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        select.select([], [], [], 0.01)


def signal_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to the main thread of a process.

    The kernel delivers a signal from `os.kill` to any thread that does not block it. Raises
    OSError, ProcessLookupError among others.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, pid, int(number)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
