"""What the kernel says of a process and of those below it, and how all of them are stopped."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def sent_bytes() -> int:
    """By all processes, over the interface through which those of one machine talk."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = (line.split(":")[1].split() for line in lines if line.split(":")[0].strip() == "lo")
    return int(loopback[8])


def family(pid: int) -> list[int]:
    """A process and all below it, the lowest first: a parent is stopped after its children.

    Without what ended in the meantime.
    """
    try:
        children = [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*(each for child in children for each in family(child)), pid]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end(pid: int) -> None:
    """End a process and all below it; none is left to start another one."""
    send(reversed(family(pid)), signal.SIGSTOP)
    send(family(pid), signal.SIGKILL)


def processor_s(pid: int) -> float:
    """Of all threads of a process, without its children; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def busy_s() -> float:
    """Of all processors together, since the machine started."""
    user, nice, system, _idle, _waits, *interrupts = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / TICKS


def peak_bytes(pid: int) -> int:
    """The most memory that a process had in use at a time, without files that it maps.

    A worker that is forked has fewer pages of libraries than one that loaded them itself, of the
    same memory. Memory that it shares with others counts. Raises OSError for one that ended.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    if "VmHWM" not in found:
        raise ProcessLookupError(f"process {pid} ended")
    return (int(found["VmHWM"]) - int(found["RssFile"])) * 1024
