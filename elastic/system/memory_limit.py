"""Memory is taken only up to what the kernel says is left before it kills a process.

Linux grants more memory than there is, and later kills a process of its choice: most likely the one
that trains. The memory may still be gone a moment later. Of control groups, only version 2 is read.
"""

from pathlib import Path


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
