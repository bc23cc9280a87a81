"""A snapshot that is found is whole, whichever process is killed at any moment.

With two slots or more the newest stays while the next is written. What was not published is never
found. Slots lie in one file of shared memory (a memfd): a page that says how the file is cut, then
for each slot a header and a body. One process writes at a time, which the owner of the memory
ensures; one process, the uploader, takes leases.

Each slot is a seqlock: its sequence number `seq` is odd while the slot is written and even when it
is whole. The k-th publishing makes it 2k, and 0 is a slot that was never written. A reader takes
`seq`, reads, and looks at `seq` again: if it is still the same even number, no byte changed in
between. Unlike in the kernel's seqlocks the numbers are drawn from one sequence for all slots, so
an even number is given once in the life of the memory, and (slot, seq) names one snapshot forever.
A writer that is killed leaves an odd number, and with it a slot that no reader finds.

The kernel finds and clears all of the memory when it is created, which takes seconds for gigabytes.

It does not promise that a body holds what its writer meant (its checksum is in `SnapshotInfo`), nor
that other ranks had the same state (`is_agreed` says it), nor that bytes read without a lease
stay. It needs Linux (memfd, /proc).
"""

import errno
import json
import mmap
import os
import struct
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic.system.processes import available_bytes
from elastic.system.untrusted import decode, parse_json

PAGE = 4096
WORD_BYTES = 8
_SHAPE = struct.Struct("qq")  # of the first page: how many slots, and the capacity of each
_ZEROS = memoryview(bytes(1 << 20))
_SEQ, _LEASES, _SIZE, _INFO, _AGREED, _HEADER_WORDS = range(6)
HEADER_BYTES = 16 * PAGE  # room for the parts of 300 ranks
INFO_LIMIT_BYTES = HEADER_BYTES - _HEADER_WORDS * WORD_BYTES
_READS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPart:
    """A part of a sharded state (snapshot/division.py) in a body: the image that begins at `start`.

    checksum: of that image. is_copy: it is that of another node's rank.
    """

    number: int
    start: int
    size_bytes: int
    checksum: str
    is_copy: bool

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """What stands in a slot's header about the state in its body.

    chain: of all steps so far. checksum: of the image, or of a state in parts (State.evidence),
    hexadecimal; empty if it is not known. line: the step's line of the metrics, None if it did not
    fit. data: what the run is trained on, as the JSON of data/record.py; empty before that was
    recorded, and where it did not fit. parts: those in the body, of `of` in all; none where the
    body is one image of the whole state.
    """

    step: int
    generation: int
    chain: str = ""
    checksum: str = ""
    line: dict[str, Any] | None = None
    data: str = ""
    of: int = 0
    parts: tuple[SnapshotPart, ...] = ()

    def to_json(self) -> bytes:
        """With its data and its line if they fit into a header; the image has the data as well."""
        for info in (self, replace(self, data="")):
            if len(text := json.dumps(asdict(info)).encode()) <= INFO_LIMIT_BYTES:
                return text
        return json.dumps(asdict(replace(self, data="", line=None))).encode()

    @staticmethod
    def parse(text: bytes) -> "SnapshotInfo":
        """Raises ValueError."""
        found = parse_json(text)
        # A line is the recipe's own: any JSON, and numbers that are not finite.
        line = found.pop("line", None) if isinstance(found, dict) else None
        info = decode(SnapshotInfo, found, what="the header of a snapshot", exact=False)
        if not all(0 <= each.number < info.of for each in info.parts):
            raise ValueError("the header of a snapshot names a part that its state has not")
        return replace(info, line=line if isinstance(line, dict) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A whole image in a slot: the first `size_bytes` bytes of its body.

    is_agreed: all ranks were found to have had this state; or all of this node, whose workers then
    died before others could be asked, and nodes compare it when they restore it.
    """

    slot: int
    seq: int
    size_bytes: int
    info: SnapshotInfo
    is_agreed: bool = False

    @property
    def images(self) -> tuple[SnapshotPart, ...]:
        """The parts of the state; an image of all of it is the one part of it."""
        whole = SnapshotPart(
            number=0, start=0, size_bytes=self.size_bytes, checksum=self.info.checksum, is_copy=False
        )
        return self.info.parts or (whole,)


class SnapshotSlots:
    def __init__(self, fd: int, num_slots: int, capacity_bytes: int) -> None:
        self.fd = fd
        self.num_slots = num_slots
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(fd, _file_bytes(num_slots, capacity_bytes))
        self._bytes = memoryview(self._map)
        # Native words: each is stored by one instruction, as in the control page. A seqlock needs
        # the stores to become visible in the order in which they are made, which x86 guarantees. On
        # processors with weaker memory order every reader here still reads after the writer's
        # death, or after a message through a socket, and both order memory.
        self._words = self._bytes.cast("q")
        # Also where no `close` comes: a worker whose state outgrew these slots drops them once it
        # needs none of their snapshots. Its descriptor would keep their memory until it ends.
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._close_fd.atexit = False

    @staticmethod
    def create(capacity_bytes: int, num_slots: int) -> "SnapshotSlots":
        """Slots for images of up to `capacity_bytes`, which is rounded up to pages.

        Raises OSError when there is not that much memory.
        """
        capacity_bytes += -capacity_bytes % PAGE
        size_bytes = _file_bytes(num_slots, capacity_bytes)
        left_bytes = available_bytes()
        if left_bytes is not None and size_bytes > left_bytes:
            raise OSError(errno.ENOMEM, f"expected {size_bytes} bytes of memory, found {left_bytes} left")
        fd = os.memfd_create("elastic-snapshots", os.MFD_CLOEXEC)
        try:
            # Write it now. A page that lacks memory later would be a SIGBUS in the middle of
            # training, or the out-of-memory killer's choice of some process; and one that the
            # kernel has to clear first would hold up the first copy.
            at = 0
            while at < size_bytes:
                at += os.pwrite(fd, _ZEROS[: size_bytes - at], at)
            os.pwrite(fd, _SHAPE.pack(num_slots, capacity_bytes), 0)
            return SnapshotSlots(fd, num_slots, capacity_bytes)
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def open(path: str) -> "SnapshotSlots":
        """The memory behind `path`, of any process of this user.

        Raises ValueError when it is no memory for snapshots, OSError when there is nothing.
        """
        return SnapshotSlots.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @staticmethod
    def attach(fd: int) -> "SnapshotSlots":
        """The memory behind a descriptor, which this object then owns.

        Raises ValueError or OSError; the descriptor is closed then.
        """
        try:
            num_slots, capacity_bytes = _SHAPE.unpack(os.pread(fd, _SHAPE.size, 0).ljust(_SHAPE.size, b"\0"))
            found_bytes = os.fstat(fd).st_size
            if min(num_slots, capacity_bytes) < 1 or found_bytes != _file_bytes(num_slots, capacity_bytes):
                raise ValueError(
                    f"expected memory for {num_slots} snapshots of {capacity_bytes} bytes, found {found_bytes} bytes in all"
                )
            return SnapshotSlots(fd, num_slots, capacity_bytes)
        except BaseException:
            os.close(fd)
            raise

    @property
    def path(self) -> str:
        """Where other processes of this machine open it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Bodies that are still in use stay readable; nothing else may be called afterwards."""
        self._words.release()
        self._bytes.release()
        with suppress(BufferError):
            self._map.close()
        self._close_fd()

    # Readers

    def whole(self) -> list[Snapshot]:
        """All whole snapshots, the last published first."""
        found = [snapshot for slot in range(self.num_slots) if (snapshot := self._read(slot)) is not None]
        return sorted(found, key=lambda snapshot: -snapshot.seq)

    def is_whole(self, slot: int, seq: int) -> bool:
        """True while the slot holds the snapshot that was published as `seq`."""
        return 0 <= slot < self.num_slots and _is_whole(seq) and self._word(slot, _SEQ) == seq

    def offset(self, slot: int) -> int:
        """Where the body begins in the memory's file."""
        return self._header(slot) + HEADER_BYTES

    def body(self, slot: int) -> memoryview:
        """uint8 [capacity_bytes], writable, page-aligned."""
        start = self.offset(slot)
        return self._bytes[start : start + self.capacity_bytes]

    # The writer

    def begin(self) -> int | None:
        """A slot to write, marked as torn; None when there is none.

        It is not a leased one, and not the newest whole one unless it is the only slot.
        """
        seqs = [self._word(slot, _SEQ) for slot in range(self.num_slots)]
        newest = max(filter(_is_whole, seqs), default=None)
        free = [
            slot
            for slot in range(self.num_slots)
            if self._word(slot, _LEASES) == 0 and (seqs[slot] != newest or self.num_slots == 1)
        ]
        # Torn slots first, then the oldest. A lease that is taken at this very moment is not seen
        # here; its holder looks at `seq` once more before it relies on the bytes.
        slot = min(free, key=lambda slot: (_is_whole(seqs[slot]), seqs[slot]), default=None)
        if slot is not None:
            self._set(slot, _SEQ, max(seqs) // 2 * 2 + 1)
        return slot

    def publish(self, slot: int, *, size_bytes: int, info: SnapshotInfo) -> Snapshot:
        """Make the first `size_bytes` of the body the newest snapshot."""
        seq, text = self._word(slot, _SEQ), info.to_json()
        assert seq % 2 == 1, "only a slot that begin() gave out is published"
        assert 0 < size_bytes <= self.capacity_bytes
        assert len(text) <= INFO_LIMIT_BYTES
        at = self._header(slot) + _HEADER_WORDS * WORD_BYTES
        self._bytes[at : at + len(text)] = text
        self._set(slot, _SIZE, size_bytes)
        self._set(slot, _INFO, len(text))
        # Last: a writer that is killed before this line has published nothing.
        self._set(slot, _SEQ, seq + 1)
        return Snapshot(slot=slot, seq=seq + 1, size_bytes=size_bytes, info=info)

    def agree(self, slot: int, seq: int) -> None:
        """Mark the state that was published as `seq` as `is_agreed`."""
        # The number instead of a flag: it is void for later publications into this slot.
        self._set(slot, _AGREED, seq)

    def invalidate(self, slot: int) -> None:
        """The snapshot must never be loaded again. It may be leased: the holder finds out."""
        seq = self._word(slot, _SEQ)
        # To the next odd number, not to the one before: seq - 1 would let the next writer publish
        # its bytes under the same even number.
        self._set(slot, _SEQ, seq + 1 if _is_whole(seq) else seq)

    def discard_newer(self, step: int) -> None:
        """No snapshot of a later step must ever be loaded."""
        for snapshot in self.whole():
            if snapshot.info.step > step:
                self.invalidate(snapshot.slot)

    # The one process that takes leases

    def lease(self, slot: int, seq: int) -> Snapshot | None:
        """The snapshot, whose slot is not written until it is released as often as it was leased.

        None when the slot does not hold the snapshot `seq` any more.
        """
        if not self.is_whole(slot, seq):
            return None
        self._set(slot, _LEASES, self._word(slot, _LEASES) + 1)
        # The writer may have begun between the look above and the lease.
        found = self._read(slot)
        if found is None or found.seq != seq:
            self.release(slot)
            return None
        return found

    def release(self, slot: int) -> None:
        self._set(slot, _LEASES, max(0, self._word(slot, _LEASES) - 1))

    def release_all(self) -> None:
        """For the owner, once the process that took leases is dead."""
        for slot in range(self.num_slots):
            self._set(slot, _LEASES, 0)

    def _read(self, slot: int) -> Snapshot | None:
        """The snapshot in a slot, by the reader's side of the seqlock; None for a torn slot."""
        for _ in range(_READS):
            seq, size_bytes, info_bytes = (self._word(slot, word) for word in (_SEQ, _SIZE, _INFO))
            at = self._header(slot) + _HEADER_WORDS * WORD_BYTES
            text = bytes(self._bytes[at : at + max(0, min(info_bytes, INFO_LIMIT_BYTES))])
            if seq != self._word(slot, _SEQ):
                continue
            if not _is_whole(seq) or not 0 < size_bytes <= self.capacity_bytes:
                return None
            try:
                info = SnapshotInfo.parse(text)
            except ValueError:
                return None  # its memory was changed: as good as torn
            is_agreed = self._word(slot, _AGREED) == seq
            return Snapshot(slot=slot, seq=seq, size_bytes=size_bytes, info=info, is_agreed=is_agreed)
        return None

    def _header(self, slot: int) -> int:
        return PAGE + slot * (HEADER_BYTES + self.capacity_bytes)

    def _word(self, slot: int, word: int) -> int:
        return self._words[self._header(slot) // WORD_BYTES + word]

    def _set(self, slot: int, word: int, value: int) -> None:
        self._words[self._header(slot) // WORD_BYTES + word] = value


def _is_whole(seq: int) -> bool:
    return seq > 0 and seq % 2 == 0


def _file_bytes(num_slots: int, capacity_bytes: int) -> int:
    return PAGE + num_slots * (HEADER_BYTES + capacity_bytes)
