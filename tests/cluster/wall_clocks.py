"""A node's wall clock can be put an hour ahead or a day back while its processes run; its monotonic
clocks stay as they are.
"""

import struct
from collections import defaultdict
from pathlib import Path

from cluster import SHARED
from commands import command
from engine import need_package

CLOCK = Path(__file__).parent / "clock.c"
HOUR_S = 3600
AHEAD_S = {"jump": HOUR_S, "jump-back": -24 * HOUR_S}


class WallClocks:
    """The wall clocks of nodes whose processes preload clock.c; `jumps`: what each of them did."""

    def __init__(self, shared: Path) -> None:
        """Raises NoEngine where there is no compiler."""
        need_package("cc", "build-essential")
        self._shared = shared
        command("cc", "-O2", "-shared", "-fPIC", "-o", str(shared / "clock.so"), str(CLOCK))
        self.jumps: defaultdict[str, set[str]] = defaultdict(set)

    def env(self, node: str) -> dict[str, str]:
        """A machine that starts again has the clock that it had."""
        if not self._ahead(node).exists():
            self._ahead(node).write_bytes(struct.pack("=q", 0))
        return {"LD_PRELOAD": f"{SHARED}/clock.so", "CLOCK_AHEAD_S": f"{SHARED}/{self._ahead(node).name}"}

    def jump(self, node: str, how: str) -> None:
        # Written in place, because the node's processes have the file mapped.
        with self._ahead(node).open("r+b") as file:
            file.write(struct.pack("=q", AHEAD_S[how]))
        self.jumps[node].add(how)

    def _ahead(self, node: str) -> Path:
        return self._shared / f"clock-{node}"


def jump_of(written: float, now: float) -> str | None:
    """Which jump a time shows that a node has written within the twelve hours before `now`."""
    if written > now:
        return "jump"
    return "jump-back" if written < now - 12 * HOUR_S else None


def true_time(written: float, now: float) -> float:
    """The time of this machine's own clock, in seconds since 1970, at which a node wrote that."""
    jump = jump_of(written, now)
    return written if jump is None else written - AHEAD_S[jump]
