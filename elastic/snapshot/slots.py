"""The newest state that was published whole can be read, whoever is killed at whatever instant; what was not published is never found.

An area is shared memory: a page that says how it is cut, then slots, each a page of header and a body. One process writes at a time, which the area's owner sees to;
one process, the uploader, takes leases. It does not promise that a body is what was meant (its checksum is in `about`), nor that what is read without a lease stays.
It needs Linux (memfd, /proc).

A slot's `seq` is even when it is whole: the k-th publishing of the area makes it 2k, and 0 is a slot that was never written. While it is written it is odd. An even number
is given once in the life of an area, so whoever remembers (slot, seq) can tell later whether the bytes are still the same.
"""

import errno
import fcntl
import json
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.system.memory_limit import available_bytes
from elastic.system.untrusted import parse_json

PAGE = 4096
MADV_POPULATE_READ = 22  # not in Python's mmap before 3.14
WORD_BYTES = 8
MAGIC = int.from_bytes(b"elastic", "little")
FORMAT = 1
MOST_SLOTS = 64
_MAGIC, _FORMAT, _SLOTS, _CAPACITY = range(4)
_SEQ, _LEASES, _SIZE, _ABOUT, _HEADER_WORDS = range(5)
ABOUT_LIMIT_BYTES = PAGE - _HEADER_WORDS * WORD_BYTES
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_READS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A whole image in a slot: `size_bytes` bytes from `offset` on in the area's file; `about` is what its writer said of it."""

    slot: int
    seq: int
    offset: int
    size_bytes: int
    about: dict[str, Any]


class SnapshotSlots:
    def __init__(self, fd: int, slots: int, capacity_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(fd, _file_bytes(slots, capacity_bytes))
        self._mapped: set[int] = set()
        self._bytes = memoryview(self._map)
        # Native words: each is stored by one instruction, as in the control page. x86 lets others see stores in the order in which they are made. On processors
        # with weaker memory every reader here still comes after the writer's death, or after a message through a socket: both order memory.
        self._words = self._bytes.cast("q")

    @staticmethod
    def create(capacity_bytes: int, slots: int) -> "SnapshotSlots":
        """Room for `slots` images of up to `capacity_bytes`, rounded up to pages. Raises OSError when there is not that much memory."""
        if not (1 <= slots <= MOST_SLOTS and capacity_bytes >= 1):
            raise ValueError(
                f"expected 1 to {MOST_SLOTS} slots of 1 byte or more, found {slots} of {capacity_bytes}"
            )
        capacity_bytes += -capacity_bytes % PAGE
        size_bytes = _file_bytes(slots, capacity_bytes)
        room_bytes = available_bytes()
        if room_bytes is not None and size_bytes > room_bytes:
            raise OSError(errno.ENOMEM, f"expected {size_bytes} bytes of memory, found {room_bytes} left")
        fd = os.memfd_create("elastic-snapshots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            # Taken now: a page that lacks memory later is a SIGBUS, or somebody's death, in the middle of training.
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            area = SnapshotSlots(fd, slots, capacity_bytes)
        except BaseException:
            os.close(fd)
            raise
        for place, word in ((_FORMAT, FORMAT), (_SLOTS, slots), (_CAPACITY, capacity_bytes), (_MAGIC, MAGIC)):
            area._words[place] = word
        return area

    @staticmethod
    def open(path: str) -> "SnapshotSlots":
        """The area behind `path`, of any process of this user. Raises ValueError when it is none, OSError when there is nothing."""
        return SnapshotSlots.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @staticmethod
    def attach(fd: int) -> "SnapshotSlots":
        """The area behind a descriptor, which then belongs to it, and is closed if this raises ValueError or OSError."""
        try:
            slots, capacity_bytes = _shape_of(fd)
            return SnapshotSlots(fd, slots, capacity_bytes)
        except BaseException:
            os.close(fd)
            raise

    @property
    def path(self) -> str:
        """Where other processes of this machine open it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Bodies that are still in use elsewhere in this process stay readable; nothing else may be called afterwards."""
        self._words.release()
        self._bytes.release()
        with suppress(BufferError):
            self._map.close()
        os.close(self.fd)

    # Readers

    def newest(self) -> Snapshot | None:
        """The whole snapshot that was published last."""
        return next(iter(self.whole()), None)

    def whole(self) -> list[Snapshot]:
        """All of them, the last published first."""
        found = [snapshot for slot in range(self.slots) if (snapshot := self._read(slot)) is not None]
        return sorted(found, key=lambda snapshot: -snapshot.seq)

    def find(self, slot: int, seq: int) -> Snapshot | None:
        """The snapshot that was published as `seq`, if the slot still holds it."""
        snapshot = self._read(slot) if 0 <= slot < self.slots else None
        return snapshot if snapshot is not None and snapshot.seq == seq else None

    def is_whole(self, slot: int, seq: int) -> bool:
        """True while the slot holds what was published in it as `seq`."""
        return 0 <= slot < self.slots and _is_whole(seq) and self._word(slot, _SEQ) == seq

    def body(self, slot: int) -> memoryview:
        """uint8 [capacity_bytes], writable, page-aligned."""
        start = self._header(slot) + PAGE
        return self._bytes[start : start + self.capacity_bytes]

    # The writer

    def begin(self) -> int | None:
        """A slot to write, marked as torn: not a leased one, and not the newest unless it is the only one. None when there is none."""
        newest = self._highest_whole()
        free = [
            slot
            for slot in range(self.slots)
            if self._word(slot, _LEASES) == 0 and (slot != newest or self.slots == 1)
        ]
        if not free:
            return None
        # Of what may go, first what is no use to anybody, then the oldest. A lease that is taken in this very moment
        # is not seen: its holder looks at `seq` again before it relies on the bytes.
        slot = min(free, key=lambda slot: (_is_whole(self._word(slot, _SEQ)), self._word(slot, _SEQ)))
        self._map_whole(slot)
        self._set(slot, _SEQ, self._last_seq() // 2 * 2 + 1)
        return slot

    def publish(self, slot: int, *, size_bytes: int, about: dict[str, Any]) -> Snapshot:
        """Make what was written into the body, its first `size_bytes`, the newest snapshot. Raises ValueError when `about` does not fit."""
        seq, text = self._word(slot, _SEQ), json.dumps(about).encode()
        assert seq % 2 == 1, "only a slot that begin() gave out is published"
        assert 0 < size_bytes <= self.capacity_bytes
        if len(text) > ABOUT_LIMIT_BYTES:
            raise ValueError(
                f"what is said about a snapshot has {len(text)} bytes, expected at most {ABOUT_LIMIT_BYTES}"
            )
        at = self._header(slot) + _HEADER_WORDS * WORD_BYTES
        self._bytes[at : at + len(text)] = text
        self._set(slot, _SIZE, size_bytes)
        self._set(slot, _ABOUT, len(text))
        # Last: a writer that is killed before this line has published nothing.
        self._set(slot, _SEQ, seq + 1)
        return Snapshot(
            slot=slot, seq=seq + 1, offset=self._header(slot) + PAGE, size_bytes=size_bytes, about=about
        )

    def forget(self, slot: int) -> None:
        """A state that must never be loaded again; also one that is leased, whose holder finds out."""
        seq = self._word(slot, _SEQ)
        # Upwards, because the even number below was given out: it must not come back with other bytes.
        self._set(slot, _SEQ, seq + 1 if _is_whole(seq) else seq)

    # The one process that takes leases

    def lease(self, slot: int, seq: int) -> bool:
        """Keep the slot from being written until it is released as often as it was leased; False when it does not hold `seq` any more."""
        if not self.is_whole(slot, seq):
            return False
        self._set(slot, _LEASES, self._word(slot, _LEASES) + 1)
        # The writer may have begun between the look and the lease.
        if self.is_whole(slot, seq):
            return True
        self.release(slot)
        return False

    def release(self, slot: int) -> None:
        self._set(slot, _LEASES, max(0, self._word(slot, _LEASES) - 1))

    def release_all(self) -> None:
        """For the owner, once whoever had leases is dead."""
        for slot in range(self.slots):
            self._set(slot, _LEASES, 0)

    def _map_whole(self, slot: int) -> None:
        """Before the first write of this process: the kernel maps all pages in one go (6 ms for 90 MB), not one at each fault (30 ms)."""
        if slot not in self._mapped:
            self._mapped.add(slot)
            with suppress(OSError):  # Linux before 5.14
                self._map.madvise(MADV_POPULATE_READ, self._header(slot), PAGE + self.capacity_bytes)

    def _read(self, slot: int) -> Snapshot | None:
        for _ in range(_READS):
            seq, size_bytes, about_bytes = (self._word(slot, word) for word in (_SEQ, _SIZE, _ABOUT))
            at = self._header(slot) + _HEADER_WORDS * WORD_BYTES
            text = bytes(self._bytes[at : at + max(0, min(about_bytes, ABOUT_LIMIT_BYTES))])
            if seq != self._word(slot, _SEQ):
                continue
            if not _is_whole(seq) or not 0 < size_bytes <= self.capacity_bytes:
                return None
            try:
                about = parse_json(text)
            except ValueError:
                about = None
            if not isinstance(about, dict):
                return None  # its memory was changed: as good as torn
            return Snapshot(
                slot=slot,
                seq=seq,
                offset=at - _HEADER_WORDS * WORD_BYTES + PAGE,
                size_bytes=size_bytes,
                about=about,
            )
        return None

    def _highest_whole(self) -> int | None:
        whole = [slot for slot in range(self.slots) if _is_whole(self._word(slot, _SEQ))]
        return max(whole, key=lambda slot: self._word(slot, _SEQ), default=None)

    def _last_seq(self) -> int:
        return max(self._word(slot, _SEQ) for slot in range(self.slots))

    def _header(self, slot: int) -> int:
        return PAGE + slot * (PAGE + self.capacity_bytes)

    def _word(self, slot: int, word: int) -> int:
        return self._words[self._header(slot) // WORD_BYTES + word]

    def _set(self, slot: int, word: int, value: int) -> None:
        self._words[self._header(slot) // WORD_BYTES + word] = value


def _is_whole(seq: int) -> bool:
    return seq > 0 and seq % 2 == 0


def _file_bytes(slots: int, capacity_bytes: int) -> int:
    return PAGE + slots * (PAGE + capacity_bytes)


def _shape_of(fd: int) -> tuple[int, int]:
    """(slots, capacity_bytes) as the file says. Raises ValueError unless they are those of a whole area that cannot shrink."""
    found_bytes = os.fstat(fd).st_size
    with memoryview(os.pread(fd, PAGE, 0).ljust(PAGE, b"\0")).cast("q") as words:
        magic, written_as, slots, capacity_bytes = words[:4]
    if magic != MAGIC or written_as != FORMAT:
        raise ValueError("expected memory for snapshots, as this version writes it, found something else")
    is_possible = 1 <= slots <= MOST_SLOTS and capacity_bytes >= PAGE and capacity_bytes % PAGE == 0
    if not is_possible or found_bytes != _file_bytes(slots, capacity_bytes):
        raise ValueError(
            f"expected memory for {slots} snapshots of {capacity_bytes} bytes, found {found_bytes} bytes in all"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError(
            "expected memory that is sealed against shrinking: reading behind its end would kill this process"
        )
    return slots, capacity_bytes
