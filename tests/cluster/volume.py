"""Faults of the shared folder can be undone, except damage to checkpoints: `damaged_steps`."""

import os
from pathlib import Path

from cluster import SHARED, Cluster
from scenario import VolumeFault

RUN, ASIDE = f"{SHARED}/run", "/mnt/aside"
MOUNTS = ("mount", "pid")
FILLER_BYTES = 2**16


class Volume:
    """The folder of the run, as all nodes see it.

    `damaged_steps`: of the checkpoints that were damaged.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._run = cluster.shared / "run"
        self._filler = self._run / "filler"
        self._locked: list[str] = []
        self.damaged_steps: set[int] = set()

    def damage(self, fault: VolumeFault) -> None:
        match fault:
            case VolumeFault.FILL:
                self._fill()
            case VolumeFault.LOCK:
                self._lock()
            case VolumeFault.FLIP:
                with self._newest().open("r+b") as file:
                    place = os.fstat(file.fileno()).st_size // 2
                    file.seek(place)
                    (byte,) = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ 1]))
            case VolumeFault.TRUNCATE:
                newest = self._newest()
                os.truncate(newest, newest.stat().st_size // 2)
            case VolumeFault.EMPTY:
                os.truncate(max(self._run.glob("rendezvous/state-*.json")), 0)

    def mend(self) -> None:
        self._filler.unlink(missing_ok=True)
        for node in self._locked:
            self._cluster.inside(node, MOUNTS, "umount", "--lazy", RUN)
        self._locked = []

    def _fill(self) -> None:
        """Fill the folder to the last byte: a tmpfs counts whole pages, and a write fails once none
        is left.
        """
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * FILLER_BYTES)
            except OSError:
                pass

    def _lock(self) -> None:
        """Cover the folder with a read-only mount of itself.

        A file that was open before can still be written, as on a server that accepts no new files.
        """
        for node in self._cluster.running():
            # The mount is made read-only elsewhere and then put in place: in the folder itself, a
            # node could open a file for writing between the two steps, and the mount would be busy.
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
        self.damaged_steps.add(int(record.parent.name))
        (payload,) = record.parent.glob("*/state.safetensors")
        return payload
