"""Stops its parent, alone or with all that comes from it, and wakes up whom it stopped: a stopped process can do neither for itself.

    python pause.py PARENT_PID SECONDS self|tree

A program of the standard library alone, so that it starts at once; it never stops itself, and never signals a process that took over a dead one's number.
It needs Linux (/proc, pidfd).
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# Between two looks a process may have been born of one that was not stopped yet.
MOST_LOOKS = 20


def tree(root: int) -> list[int]:
    """Pids of a process and of all that come from it, parents first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += sorted(child for child, parent in parents.items() if parent == pid)
    return found


def hold(root: int, *, with_children: bool) -> dict[int, int]:
    """Stop them; gives a descriptor for each pid."""
    held: dict[int, int] = {}
    for _ in range(MOST_LOOKS):
        there = tree(root) if with_children else [root]
        new = [pid for pid in there if pid not in held and pid != os.getpid()]
        if not new:
            break
        for pid in new:
            with suppress(OSError):
                held[pid] = os.pidfd_open(pid)
                if pid == root and os.getppid() != root:  # it is dead, and this is somebody else
                    sys.exit()
                signal.pidfd_send_signal(held[pid], signal.SIGSTOP)
    return held


def main() -> None:
    root, seconds, whom = sys.argv[1:]
    held = hold(int(root), with_children=whom == "tree")
    time.sleep(float(seconds))
    for descriptor in held.values():
        with suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)


if __name__ == "__main__":
    main()
