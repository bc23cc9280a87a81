"""Stops its parent process, alone or with all its descendants, and continues them later.

    python pause.py PARENT_PID SECONDS self|tree

A stopped process cannot continue itself, so it runs this program first. The program uses the
standard library alone, so that it starts at once. It never stops itself, and never signals a
process that took over the number of a dead one. It needs Linux (/proc, pidfd).
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# A process that is not stopped yet may fork between two scans of /proc, so scans go on until one
# finds nothing new. Each scan stops at least one process; the limit is for a program that forks
# without end.
MAX_SCANS = 20


def process_tree(root: int) -> list[int]:
    """The pids of a process and all its descendants, parents first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += sorted(child for child, parent in parents.items() if parent == pid)
    return found


def stop(root: int, *, with_children: bool) -> dict[int, int]:
    """Stop the parent `root`, or its whole tree; returns a pidfd for each pid that was stopped."""
    stopped: dict[int, int] = {}
    for _ in range(MAX_SCANS):
        pids = process_tree(root) if with_children else [root]
        new = [pid for pid in pids if pid not in stopped and pid != os.getpid()]
        if not new:
            break
        for pid in new:
            with suppress(OSError):
                stopped[pid] = os.pidfd_open(pid)
                # If the parent died, this process has another parent by now, and the number may
                # belong to a stranger. The check comes after pidfd_open: from then on the
                # descriptor means one process only, so the parent that is still ours is the one
                # that gets the signal.
                if pid == root and os.getppid() != root:
                    sys.exit()
                signal.pidfd_send_signal(stopped[pid], signal.SIGSTOP)
    return stopped


def main() -> None:
    root, seconds, scope = sys.argv[1:]
    stopped = stop(int(root), with_children=scope == "tree")
    time.sleep(float(seconds))
    for descriptor in stopped.values():
        with suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)


if __name__ == "__main__":
    main()
