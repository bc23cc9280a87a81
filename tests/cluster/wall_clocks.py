"""A node's wall clock can be put an hour ahead or a day back while its processes run; its monotonic
clocks stay as they are.
"""

import struct
from collections import defaultdict
from pathlib import Path

from apt import need
from cluster import SHARED
from machines import command
from oracle import AHEAD_S

CLOCK = Path(__file__).parent / "clock.c"


class WallClocks:
    """The wall clocks of nodes whose processes preload clock.c; `jumps`: what each of them did."""

    def __init__(self, shared: Path) -> None:
        """Raises NotAvailable where there is no compiler."""
        need("cc", "build-essential")
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
