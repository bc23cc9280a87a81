"""What the nodes share, the run's folder and the wall clocks, is harmed from outside, and can be made what it was.

Checkpoints stay as they were harmed: `spoiled` says of which steps.
"""

import os
import struct
import subprocess
from pathlib import Path

from cluster import SHARED, Cluster
from engine import need_package
from evidence import HOUR_S
from scenario import Harm

CLOCK = Path(__file__).parent / "clock.c"
RUN, ASIDE = f"{SHARED}/run", "/mnt/aside"
MOUNTS = ("mount", "pid")
FILLER_BYTES = 2**16


class Volume:
    """The folder of the run, as all nodes see it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._run = cluster.shared / "run"
        self._filler = self._run / "filler"
        self._locked: list[str] = []
        self.spoiled: set[int] = set()

    def harm(self, harm: Harm) -> None:
        match harm:
            case Harm.FILL:
                self._fill()
            case Harm.LOCK:
                self._lock()
            case Harm.FLIP:
                with self._newest().open("r+b") as file:
                    place = os.fstat(file.fileno()).st_size // 2
                    file.seek(place)
                    (byte,) = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ 1]))
            case Harm.TRUNCATE:
                newest = self._newest()
                os.truncate(newest, newest.stat().st_size // 2)

    def mend(self) -> None:
        self._filler.unlink(missing_ok=True)
        for node in self._locked:
            self._cluster.inside(node, MOUNTS, "umount", "--lazy", RUN)
        self._locked = []

    def _fill(self) -> None:
        """To the last byte: the kernel counts pages, and so writes stop where one is missing."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * FILLER_BYTES)
            except OSError:
                pass

    def _lock(self) -> None:
        """Another mount of the folder, read-only, hides it: a file that was open before can still be written, as on a server that takes no new ones."""
        for node in self._cluster.running():
            # Made elsewhere: where everybody writes, one could slip in between the two steps and keep the mount busy.
            for words in (
                ("mkdir", "-p", ASIDE),
                ("mount", "--bind", RUN, ASIDE),
                ("mount", "-o", "remount,bind,ro", ASIDE),
                ("mount", "--bind", ASIDE, RUN),
                ("umount", ASIDE),
            ):
                self._cluster.inside(node, MOUNTS, *words)
            self._locked.append(node)

    def _newest(self) -> Path:
        record = max(self._run.glob("checkpoints/*/COMMIT.json"))
        self.spoiled.add(int(record.parent.name))
        (payload,) = record.parent.glob("*/state.safetensors")
        return payload


class WallClocks:
    """Of nodes whose processes ask a library of ours for the time (clock.c); the clocks that only measure go on as they do."""

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
        # In place: its processes have the file mapped.
        with (self._shared / f"clock-{node}").open("r+b") as file:
            file.write(struct.pack("=q", int(HOUR_S)))
        self.jumped.add(node)
