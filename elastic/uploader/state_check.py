"""Bytes of a checkpoint are used only if they match their commit record, and are the state whose
digest the record has.

`check_state` and `read_state` accept the same payloads. Neither says whether the state fits a
recipe's objects; only the recipe can tell.
"""

import hashlib
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from elastic.checkpoint.catalog import payload_bytes
from elastic.checkpoint.record import OF_BYTES, CommitRecord
from elastic.errors import CheckpointDamaged
from elastic.snapshot.image_hash import ImageHash, Pieces, Source, check_digest
from elastic.storage.store import Store, reading
from elastic.system.clock import Clock
from elastic.system.parallel import Task, num_threads, run_all


def check_state(store: Store, record: CommitRecord, clock: Clock) -> None:
    """Read a payload piece by piece, and keep none: it may be larger than this machine's memory.

    Raises CheckpointDamaged for what a restore would not accept; StoreFailed.
    """
    reading(lambda: check_once(store, record, lambda: None), clock)


def check_once(store: Store, record: CommitRecord, between: Callable[[], None]) -> None:
    """The same in one try.

    between: called before each piece, by several threads; what it raises ends the check.
    """

    def pieces(start: int, end: int) -> Pieces:
        for piece in payload_bytes(store, record, start, end):
            between()
            yield piece

    _check(pieces, record)


def read_state(
    store: Store, record: CommitRecord, clock: Clock, memory: memoryview | None = None
) -> memoryview:
    """The image, as uint8 [size_bytes], in new memory that may be written to, or in `memory`.

    Raises as `check_state`; then `memory` holds anything.
    """
    image = _new_memory(record) if memory is None else memory

    def whole() -> memoryview:

        def pieces(start: int, end: int) -> Pieces:
            for piece in payload_bytes(store, record, start, end):
                kept = image[start : start + len(piece)]
                kept[:] = piece
                start += len(piece)
                yield kept

        _check(pieces, record)
        return image

    return reading(whole, clock)


def _check(source: Source, record: CommitRecord) -> None:
    """Raises CheckpointDamaged, or what `source` raises."""
    found = ImageHash(source, record.size_bytes)
    tasks, of_bytes = found.tasks(), hashlib.sha256()
    if record.hash == OF_BYTES:
        # A pass of its own, and the longest: it begins first.
        tasks.insert(0, _hash_in_order(source(0, record.size_bytes), of_bytes))
    run_all(tasks, num_threads())
    run_all([_hash_in_order(source(record.size_bytes, record.size_bytes), of_bytes)], 1)  # nothing follows
    sha256 = of_bytes.hexdigest() if record.hash == OF_BYTES else found.parts_sha256()
    if sha256 != record.sha256:
        raise CheckpointDamaged(
            f"the payload {record.payload} has {record.hash} {sha256[:16]}, expected {record.sha256[:16]}: its bytes were changed"
        )
    check_digest(found.digest(), record.digest)


def _hash_in_order(pieces: Pieces, digest: Any) -> Task:
    for piece in pieces:
        digest.update(piece)
        yield


def _new_memory(record: CommitRecord) -> memoryview:
    """uint8 [size_bytes]. Pages that are never touched take no memory, in case the record lies."""
    try:
        memory = mmap.mmap(-1, max(1, record.size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CheckpointDamaged(
            f"the payload {record.payload} should have {record.size_bytes} bytes, more than this process can hold"
        ) from error
    with suppress(OSError):  # raised by a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[: record.size_bytes]
