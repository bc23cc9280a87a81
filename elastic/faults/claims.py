"""A fault strikes once in a run: whoever is about to carry it out takes its claim, a file that is created exclusively, and nobody gets it twice.

Claims lie in the run directory, and so outlive whom they kill. With a run directory that nodes do not share (a URL), each machine has claims of its own.
"""

import re
from pathlib import Path

from elastic.faults.plan import Fault


class Claims:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, fault: Fault, strike: int = 0) -> bool:
        """Whether this process is the one to carry out this strike, the only one unless the fault is repeated."""
        path = self._path(fault, strike)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            # A full disk, say, which may be what the drill is about: without a claim it would strike at every replay.
            print(f"fault not injected, its claim cannot be written ({error}): {fault.text}", flush=True)
            return False
        return True

    def is_taken(self, fault: Fault, strike: int = 0) -> bool:
        return self._path(fault, strike).exists()

    def _path(self, fault: Fault, strike: int) -> Path:
        # After its meaning and not its place in the plan, which may be edited between two starts of a run.
        return self._folder / re.sub(r"[^a-z0-9.]+", "-", str(fault)) / f"{fault.twin}.{strike}"
