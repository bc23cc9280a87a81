"""Bytes of a checkpoint are used only if they match their commit record, and are the state whose
digest the record has.

`check_state` and `read_state` accept the same payloads. Neither says whether the state fits a
recipe's objects; only the recipe can tell.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from elastic.checkpoint.catalog import payload_bytes
from elastic.checkpoint.record import OF_BYTES, CommitRecord
from elastic.errors import CheckpointDamaged
from elastic.snapshot.image_hash import ImageHash, Pieces, Source, check_digest
from elastic.storage.store import Store, reading
from elastic.system.clock import Clock
from elastic.system.parallel import Task, num_threads, run_all
from elastic.system.sealed_memory import OwnMemory, SealedMemory, new_memory


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


def read_state(store: Store, record: CommitRecord, clock: Clock) -> SealedMemory | OwnMemory:
    """The image, sealed; the caller closes it.

    Raises as `check_state`; OSError where memory ends.
    """

    def whole() -> SealedMemory | OwnMemory:
        try:
            memory = new_memory(record.size_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise CheckpointDamaged(
                f"the payload {record.payload} should have {record.size_bytes} bytes, more than this process can hold"
            ) from error
        try:
            _check(partial(_kept, memory, store, record), record)
            memory.seal()
        except BaseException:
            memory.close()
            raise
        return memory

    return reading(whole, clock)


def _kept(
    memory: SealedMemory | OwnMemory, store: Store, record: CommitRecord, start: int, end: int
) -> Pieces:
    for piece in payload_bytes(store, record, start, end):
        memory.write(start, piece)
        start += len(piece)
        yield piece


def _check(source: Source, record: CommitRecord) -> None:
    """Raises CheckpointDamaged, or what `source` raises."""
    found = ImageHash(source, record.size_bytes)
    tasks, of_bytes = found.tasks(), hashlib.sha256()
    if record.hash == OF_BYTES:
        # A pass of its own, and the longest: it begins first.
        tasks.insert(0, _hash_in_order(source(0, record.size_bytes), of_bytes))
    run_all(tasks, num_threads())
    sha256 = of_bytes.hexdigest() if record.hash == OF_BYTES else found.parts_sha256()
    if sha256 != record.sha256:
        raise CheckpointDamaged(
            f"the payload {record.payload} has {record.hash} {sha256[:16]}, expected {record.sha256[:16]}: its bytes were changed"
        )
    check_digest(found.digest(), record.digest)
    deque(source(record.size_bytes, record.size_bytes), maxlen=0)  # nothing follows


def _hash_in_order(pieces: Pieces, digest: Any) -> Task:
    for piece in pieces:
        digest.update(piece)
        yield
