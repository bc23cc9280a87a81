"""A node's wall clock can be put an hour ahead while its processes run; its monotonic clocks stay
as they are.
"""

import struct
import subprocess
from pathlib import Path

from cluster import SHARED
from engine import need_package
from evidence import HOUR_S

CLOCK = Path(__file__).parent / "clock.c"


class WallClocks:
    """The wall clocks of nodes whose processes preload clock.c; `jumped`: nodes whose clock went
    ahead.
    """

    def __init__(self, shared: Path) -> None:
        """Raises NoEngine where there is no compiler."""
        need_package("cc", "build-essential")
        self._shared = shared
        words = ("cc", "-O2", "-shared", "-fPIC", "-o", str(shared / "clock.so"), str(CLOCK))
        subprocess.run(words, check=True)
        self.jumped: set[str] = set()

    def env(self, node: str) -> dict[str, str]:
        (self._shared / f"clock-{node}").write_bytes(struct.pack("=q", 0))
        return {"LD_PRELOAD": f"{SHARED}/clock.so", "CLOCK_AHEAD_S": f"{SHARED}/clock-{node}"}

    def jump(self, node: str) -> None:
        # Written in place, because the node's processes have the file mapped.
        with (self._shared / f"clock-{node}").open("r+b") as file:
            file.write(struct.pack("=q", int(HOUR_S)))
        self.jumped.add(node)
