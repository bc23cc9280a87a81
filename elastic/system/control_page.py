"""An agent and its workers share a little memory; each word of it is read whole, old or new.

Words are aligned and have 64 bits, so no lock is needed. Several words are not read at one instant.
Agent and workers write the drain request; the agent, how it is meant, where the memory for
snapshots is, and for what size there is none; workers all else, but for `is_settled`, which both
write. The page vanishes with the agent. It needs Linux (memfd, /proc).
"""

import mmap
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from elastic.system.silence import Heartbeat, Phase

SIZE_BYTES = 8192
# The page is a table of words, eight in a row. Rows 0 and 1 belong to the node; each worker has one
# of the others.
ROWS, WORDS_IN_ROW, FIRST_OF_WORKERS = 128, 8, 2
MAX_WORKERS = ROWS - FIRST_OF_WORKERS
STEP, PHASE, BEATS, OPEN_STEP = 0, 1, 2, 3
# A vote takes two words: the step, and the checksum of the worker's state after it. Two votes are
# enough: by the time of the second one, all ranks' sums have told about the first.
VOTES = (4, 6)
T = TypeVar("T", bound=int)


class _Word(Generic[T]):
    """One word of the node, as an attribute of its page; kind: the type that reads it."""

    def __init__(self, at: int, kind: Callable[[int], T]) -> None:
        self._at = at
        self._kind = kind

    def __get__(self, page: "ControlPage", _: type) -> T:
        return self._kind(page._words[divmod(self._at, WORDS_IN_ROW)])  # noqa: SLF001

    def __set__(self, page: "ControlPage", value: T) -> None:
        page._words[divmod(self._at, WORDS_IN_ROW)] = int(value)  # noqa: SLF001


class ControlPage:
    """drain: the agent asks its workers for a drain. drains_at_once: without the further step that
    the next group would compare. rehearses: the workers ended to be started anew, for no other
    reason. leaves: this node is to leave the group.

    wanted_bytes: the size of a snapshot slot that the workers ask for. refused_bytes: the last such
    size for which the node has no memory in this generation. shared_step: the last one whose state
    every node of this generation is known to keep in its memory. restored_step: the one whose state
    this generation began with. Each is 0 for none.
    """

    drain = _Word(0, bool)
    wanted_bytes = _Word(1, int)
    _slots = _Word(2, int)
    is_settled = _Word(3, bool)  # the difference that the agent handed to its workers
    refused_bytes = _Word(4, int)
    shared_step = _Word(5, int)
    restored_step = _Word(6, int)
    drains_at_once = _Word(8, bool)
    rehearses = _Word(9, bool)
    leaves = _Word(10, bool)

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._page = mmap.mmap(fd, SIZE_BYTES)
        # A memoryview of native words stores each word with one instruction. struct with a fixed
        # byte order would store byte by byte, and a reader could see half of a word.
        self._words = memoryview(self._page).cast("q", (ROWS, WORDS_IN_ROW))

    @staticmethod
    def create() -> "ControlPage":
        """A page of this process, for an agent; its workers open `path`."""
        fd = os.memfd_create("elastic-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE_BYTES)
        return ControlPage(fd)

    @staticmethod
    def open(path: str) -> "ControlPage":
        return ControlPage(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where other processes of this machine open the page, while the agent lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def slots_fd(self) -> int | None:
        """Descriptor of the snapshot slots in the agent's process; None while there are none."""
        return None if self._slots == 0 else self._slots - 1

    @slots_fd.setter
    def slots_fd(self, fd: int | None) -> None:
        # A fresh page is all zeros, and 0 is a descriptor.
        self._slots = 0 if fd is None else fd + 1

    def step(self, local_rank: int) -> int:
        """The last step that this worker finished or restored in this generation; 0 before."""
        return self._words[FIRST_OF_WORKERS + local_rank, STEP]

    def set_step(self, local_rank: int, step: int) -> None:
        self._words[FIRST_OF_WORKERS + local_rank, STEP] = step

    def open_step(self, local_rank: int) -> int | None:
        """The step in which this worker is in its loop, 0 before its first; None outside of it.

        A worker that ends meanwhile leaves it so: its end was none of the loop.
        """
        word = self._words[FIRST_OF_WORKERS + local_rank, OPEN_STEP]
        return None if word == 0 else word - 1

    def set_open_step(self, local_rank: int, step: int | None) -> None:
        self._words[FIRST_OF_WORKERS + local_rank, OPEN_STEP] = 0 if step is None else step + 1

    def vote(self, local_rank: int, step: int, checksum: int) -> None:
        """A worker's state after `step` has this checksum, of 63 bits.

        The older of its two votes makes way.
        """
        row = FIRST_OF_WORKERS + local_rank
        at = min(VOTES, key=lambda at: self._words[row, at])
        # A worker that is killed between the lines has not voted.
        self._words[row, at] = 0
        self._words[row, at + 1] = checksum
        self._words[row, at] = step

    def votes(self, local_rank: int) -> dict[int, int]:
        """The checksums that a worker voted for in this generation, by step."""
        row = FIRST_OF_WORKERS + local_rank
        return {self._words[row, at]: self._words[row, at + 1] for at in VOTES if self._words[row, at]}

    def beat(self, local_rank: int, phase: Phase) -> None:
        """Show that this worker moves, and in which phase it is."""
        row = FIRST_OF_WORKERS + local_rank
        self._words[row, PHASE] = phase
        self._words[row, BEATS] += 1

    def heartbeat(self, local_rank: int) -> Heartbeat:
        step, phase, beats = (self._words[FIRST_OF_WORKERS + local_rank, i] for i in (STEP, PHASE, BEATS))
        return Heartbeat(step=step, phase=Phase(phase), beats=beats)

    def clear(self) -> None:
        """Set every word to 0: a new generation must read nothing of the old one."""
        self._page[:] = bytes(SIZE_BYTES)
