"""Facts about processes and their memory, and signals to them, that the standard library lacks.

Linux only (/proc, prctl, tgkill). Linux grants more memory than there is, and later kills a process
of its choice: most likely the one that trains. So memory is taken only up to what the kernel says
is left before that; it may still be gone a moment later. Of control groups, only version 2 is read.
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


def signal_name(number: int) -> str:
    """Its name; for a real-time signal, which Python does not name, its distance from SIGRTMIN."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"SIGRTMIN+{number - signal.SIGRTMIN}"


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
    if ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, int(number)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes left on this machine, or in the tightest control group around this process.

    None if the kernel tells neither. root: the folder of `proc` and `sys`.
    """
    limits = [kib * 1024 for kib in _numbers(root / "proc/meminfo", "MemAvailable:")]
    top = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        if line.startswith("0::"):
            group = top / line.removeprefix("0::").strip("/")
            around = [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
            limits += [left for each in around if (left := _of_group(each)) is not None]
    return min(limits, default=None)


def resident_bytes(pid: int) -> int:
    """Of memory that is no file's; 0 for a process that is gone."""
    return 1024 * sum(_numbers(Path(f"/proc/{pid}/status"), "RssAnon:"))


def _of_group(group: Path) -> int | None:
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if not limit or not used or limit[0] == "max":
        return None
    # The kernel frees inactive pages of the file cache before it kills a process.
    reclaimable = sum(_numbers(group / "memory.stat", "inactive_file"))
    return max(0, int(limit[0]) - int(used[0]) + reclaimable)


def _numbers(path: Path, name: str) -> list[int]:
    """The number on each line that begins with this word."""
    return [int(words[1]) for words in map(str.split, _lines(path)) if words[:1] == [name]]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
