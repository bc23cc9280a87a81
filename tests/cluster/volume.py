"""Faults of the run's folder: it is full, files are damaged, its disk loses power.

All can be undone, except damage to checkpoints: `damaged_steps`.

A disk whose power can be cut is a file system of its own on a file of this machine. A write of a
program changes the memory of the file system first; it reaches the file when it is synced, or some
seconds later. After a cut the file's copy of that moment is mounted in its place, as a disk is
after a restart. The file system is set to write as late as it may: of what is not synced, nearly
everything is lost.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cluster import Cluster, give
from machines import command

# Commit the journal only when it is asked for, and do not write a file's data early because the
# file was renamed.
OPTIONS = "loop,commit=300,noauto_da_alloc"
FILLER_BYTES = 2**16


class Volume:
    """The folder of the run, as all nodes see it. Methods raise RuntimeError."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, int]) -> None:
        self._run = cluster.shared / "run"
        self._filler = self._run / "filler"
        self._image = cluster.folder / "disk"
        self.damaged_steps: set[int] = set()
        if size_mib := settings.get("volume"):
            command("mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(self._run))
        if size_mib := settings.get("disk"):
            command("truncate", f"--size={size_mib}M", str(self._image))
            command("mkfs.ext4", "-q", "-m", "0", str(self._image))
            command("mount", "-o", OPTIONS, str(self._image), str(self._run))
            (self._run / "lost+found").rmdir()
        give(self._run)
        command("sync", "--file-system", str(self._run))

    def damage(self, fault: str) -> None:
        match fault:
            case "fill":
                # To the last byte: a tmpfs counts whole pages, and a write fails once none is left.
                with self._filler.open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(b"x" * FILLER_BYTES)
            case _:  # flip
                with self._newest().open("r+b") as file:
                    place = os.fstat(file.fileno()).st_size // 2
                    (byte,) = os.pread(file.fileno(), 1, place)
                    os.pwrite(file.fileno(), bytes([byte ^ 1]), place)

    def mend(self) -> None:
        self._filler.unlink(missing_ok=True)

    def cut_power(self) -> None:
        """No process may use the disk any more; its last writes may still be in memory."""
        before, self._image = self._image, self._image.with_name(f"{self._image.name}-cut")
        # The copy comes before `umount`, which would write what is to be lost.
        command("cp", "--sparse=always", str(before), str(self._image))
        command("umount", "--lazy", str(self._run))
        command("mount", "-o", OPTIONS, str(self._image), str(self._run))

    def _newest(self) -> Path:
        record = max(self._run.glob("checkpoints/*/*/COMMIT.json"))
        self.damaged_steps.add(int(record.parent.parent.name))
        return max(record.parent.glob("*.safetensors"))
