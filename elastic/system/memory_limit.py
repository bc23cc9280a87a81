"""How much memory may still be taken before the kernel kills somebody for it, as far as the kernel says.

Linux grants memory that is not there and later ends a process of its own choice, most likely the one that trains. It does not promise that the memory is still there a
moment later. Limits of control groups are seen in their second version only.
"""

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """What this machine, and every control group around this process, have left; None where neither says. root: where proc and sys are."""
    found = _of_machine(root / "proc/meminfo")
    limits = [] if found is None else [found]
    top = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        if line.startswith("0::"):
            group = top / line.removeprefix("0::").strip("/")
            around = [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
            limits += [left for each in around if (left := _of_group(each)) is not None]
    return min(limits, default=None)


def _of_machine(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _of_group(group: Path) -> int | None:
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if not limit or not used or limit[0] == "max":
        return None
    # Pages of files that nobody looks at are given up before anybody is killed.
    given_up = [
        line.split()[1] for line in _lines(group / "memory.stat") if line.startswith("inactive_file ")
    ]
    return max(0, int(limit[0]) - int(used[0]) + sum(map(int, given_up)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
