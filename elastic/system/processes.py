"""A process is forked only while it has one thread: a lock that another thread holds would be held for ever in the child."""

from pathlib import Path


def threads() -> int:
    """Of this process, whoever started them; it needs Linux (/proc)."""
    return len(list(Path("/proc/self/task").iterdir()))
