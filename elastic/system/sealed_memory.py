"""Memory that one process fills, and that others of its machine then map: nothing changes it again.

Each process sees what was written. Where it writes to its own view, the kernel gives it a copy of
that page alone. The memory lives as long as one process has it open or mapped. It needs Linux
(memfd, /proc), and processes of one user.
"""

import fcntl
import mmap
import os
from pathlib import Path

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SealedMemory:
    def __init__(self, size_bytes: int) -> None:
        """Nothing is taken before it is written. Raises OSError, or OverflowError."""
        self._fd = os.memfd_create("elastic-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def path(self) -> str:
        """What others give to `open_sealed` once it is sealed, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Put bytes at an offset; several threads may. Raises OSError.

        By a system call: the kernel gives a page with its content, where a store into a mapping
        would have each page cleared first, one fault after another, which takes as long again.
        """
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._fd, rest, start)
            start, rest = start + written, rest[written:]

    def seal(self) -> None:
        """No process can write from here on. Raises OSError."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)

    def view(self) -> memoryview:
        """That of this process, once it is sealed. Raises OSError."""
        return _private_view(self._fd)

    def close(self) -> None:
        """Views stay as they are."""
        os.close(self._fd)


def open_sealed(path: str) -> memoryview:
    """A view of the memory that another process has sealed, which outlives that process.

    Raises OSError where it cannot be opened, ValueError where it is not sealed memory.
    """
    with Path(path).open("rb", buffering=0) as file:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"expected {path} to be sealed memory, found that it may still change")
        return _private_view(file.fileno())


def this_machine() -> str:
    """The same for two processes only if each finds the other in its /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino} {os.getuid()}"


def _private_view(fd: int) -> memoryview:
    """Writable; changes stay in this process. Raises OSError, ValueError."""
    size_bytes = os.fstat(fd).st_size
    found = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return memoryview(found)
