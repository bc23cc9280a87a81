"""A disk whose power can be cut: it then holds what was written to it, and no more.

The folder is a file system of its own on a file of this machine. A write of a program changes the
memory of the file system first; it reaches the file when it is synced, or some seconds later. After
a cut the file's copy of that moment is mounted in its place, as a disk is after a restart. The file
system is set to write as late as it may: of what is not synced, nearly everything is lost.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

# Commit the journal only when it is asked for, and do not write a file's data early because the
# file was renamed.
OPTIONS = "loop,commit=300,noauto_da_alloc"


class Disk:
    def __init__(self, mounted: Path, size_mib: int) -> None:
        self._mounted = mounted
        self._size_mib = size_mib
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-disk-"))
        self._cuts = 0

    def begin(self) -> None:
        """Raises RuntimeError, as all that follow."""
        with self._image.open("xb") as file:
            file.truncate(self._size_mib * 2**20)
        _command("mkfs.ext4", "-q", "-m", "0", str(self._image))
        self._mount()
        (self._mounted / "lost+found").rmdir()

    def sync(self) -> None:
        _command("sync", "--file-system", str(self._mounted))

    def cut_power(self) -> None:
        """No process may use the disk any more; its last writes may still be in memory."""
        before = self._image
        self._cuts += 1
        # The copy comes before `umount`, which would write what is to be lost.
        _command("cp", "--sparse=always", str(before), str(self._image))
        _command("umount", "--lazy", str(self._mounted))
        self._mount()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self._mounted], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _image(self) -> Path:
        return self._folder / f"disk-{self._cuts}"

    def _mount(self) -> None:
        _command("mount", "-o", OPTIONS, str(self._image), str(self._mounted))


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
