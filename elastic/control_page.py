"""One page of memory shared by an agent and its workers: eight bytes each way, no message, no lock.

The agent writes the drain request; each worker writes the step that it has finished. A word is written whole (aligned, 64 bits), so a
reader sees the old value or the new one. The page vanishes with the agent. It needs Linux (memfd, /proc).
"""

import mmap
import os
import struct

SIZE_BYTES = 4096
WORD = struct.Struct("=q")
DRAIN, FIRST_STEP_WORD = 0, 1
MAX_WORKERS = SIZE_BYTES // WORD.size - FIRST_STEP_WORD


class ControlPage:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._page = mmap.mmap(fd, SIZE_BYTES)

    @staticmethod
    def create() -> "ControlPage":
        """Made by the agent; workers open `path`."""
        fd = os.memfd_create("elastic-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE_BYTES)
        return ControlPage(fd)

    @staticmethod
    def open(path: str) -> "ControlPage":
        return ControlPage(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where other processes of this machine open it, while the agent lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def drain(self) -> bool:
        return self._read(DRAIN) != 0

    @drain.setter
    def drain(self, wanted: bool) -> None:
        self._write(DRAIN, int(wanted))

    def step(self, local_rank: int) -> int:
        """The last step that this worker finished in this generation; 0 before its first."""
        return self._read(FIRST_STEP_WORD + local_rank)

    def set_step(self, local_rank: int, step: int) -> None:
        self._write(FIRST_STEP_WORD + local_rank, step)

    def clear(self) -> None:
        """Before a new generation: nothing of the old one may be read in it."""
        self._page[:] = bytes(SIZE_BYTES)

    def _read(self, word: int) -> int:
        return int(WORD.unpack_from(self._page, word * WORD.size)[0])

    def _write(self, word: int, value: int) -> None:
        WORD.pack_into(self._page, word * WORD.size, value)
