"""One page of memory shared by an agent and its workers: a few words each way, no message, no lock.

The agent writes the drain request and where the memory for snapshots is; workers write how much of it they want, and each its own step and pulse. A word is
written whole (aligned, 64 bits), so a reader sees the old value or the new one; several words are not read at one instant. The page vanishes with the agent.
It needs Linux (memfd, /proc).
"""

import mmap
import os
from dataclasses import dataclass

from elastic.system.phase import Place

SIZE_BYTES = 4096
WORD_BYTES = 8
DRAIN, WANTED_BYTES, AREA, FIRST_OF_WORKERS = 0, 1, 2, 8
STEP, PLACE, BEATS, WORDS_PER_WORKER = 0, 1, 2, 4
MAX_WORKERS = (SIZE_BYTES // WORD_BYTES - FIRST_OF_WORKERS) // WORDS_PER_WORKER


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What one worker shows: the last step that it finished in this generation (0 before), where it is, and a count that grows while it moves."""

    step: int
    place: Place
    beats: int


class ControlPage:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._page = mmap.mmap(fd, SIZE_BYTES)
        # A memoryview of native words stores each with one instruction; struct in a fixed byte order would go byte by byte.
        self._words = memoryview(self._page).cast("q")

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
        return self._words[DRAIN] != 0

    @drain.setter
    def drain(self, wanted: bool) -> None:
        self._words[DRAIN] = int(wanted)

    @property
    def wanted_bytes(self) -> int:
        """How large a slot for snapshots the workers ask for; 0 while they ask for none."""
        return self._words[WANTED_BYTES]

    @wanted_bytes.setter
    def wanted_bytes(self, size: int) -> None:
        self._words[WANTED_BYTES] = size

    @property
    def area(self) -> int | None:
        """Descriptor, in the agent's process, of the memory for snapshots; None while there is none."""
        word = self._words[AREA]
        return None if word == 0 else word - 1

    @area.setter
    def area(self, fd: int | None) -> None:
        self._words[AREA] = 0 if fd is None else fd + 1

    def step(self, local_rank: int) -> int:
        """The last step that this worker finished in this generation; 0 before its first."""
        return self._words[_of(local_rank) + STEP]

    def set_step(self, local_rank: int, step: int) -> None:
        self._words[_of(local_rank) + STEP] = step

    def beat(self, local_rank: int, place: Place) -> None:
        """Show that this worker moves, and where it is."""
        at = _of(local_rank)
        self._words[at + PLACE] = place
        self._words[at + BEATS] += 1

    def pulse(self, local_rank: int) -> Pulse:
        at = _of(local_rank)
        return Pulse(
            step=self._words[at + STEP],
            place=Place(self._words[at + PLACE]),
            beats=self._words[at + BEATS],
        )

    def clear(self) -> None:
        """Before a new generation: nothing of the old one may be read in it."""
        self._page[:] = bytes(SIZE_BYTES)


def _of(local_rank: int) -> int:
    return FIRST_OF_WORKERS + local_rank * WORDS_PER_WORKER
