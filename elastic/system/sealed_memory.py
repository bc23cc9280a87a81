"""Memory that one process fills, and that others of its machine then map: nothing changes it again.

Each process sees what was written. Where it writes to its own view, the kernel gives it a copy of
that page alone. The memory lives as long as one process has it open or mapped. It needs Linux
(memfd, /proc), and processes of one user.
"""

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SealedMemory:
    def __init__(self, size_bytes: int) -> None:
        """Raises OSError, OverflowError or ValueError where there is not that much memory."""
        self._fd = os.memfd_create("elastic-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size_bytes)
            self._map = mmap.mmap(self._fd, size_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.body = memoryview(self._map)
        self._is_sealed = False

    @property
    def path(self) -> str:
        """What others give to `open_sealed`, until `close`; empty where it is not sealed."""
        return f"/proc/{os.getpid()}/fd/{self._fd}" if self._is_sealed else ""

    def seal(self) -> memoryview:
        """No process can write from here on; returns this one's own view.

        Where `body` is still in use, by a thread of a library, it stays this process's alone.
        """
        with suppress(BufferError, OSError):
            self.body.release()
            self._map.close()
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._is_sealed = True
        return _private_view(self._fd)

    def close(self) -> None:
        """Views stay as they are."""
        os.close(self._fd)


def open_sealed(path: str) -> memoryview:
    """A view of the memory that another process has sealed, which outlives that process.

    Raises OSError where it cannot be opened, ValueError where it is not sealed memory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"expected {path} to be sealed memory, found that it may still change")
        return _private_view(fd)
    finally:
        os.close(fd)


def this_machine() -> str:
    """The same for two processes only if each finds the other in its /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino} {os.getuid()}"


def _private_view(fd: int) -> memoryview:
    """Writable; what is written stays in this process."""
    size_bytes = os.fstat(fd).st_size
    found = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return memoryview(found)
