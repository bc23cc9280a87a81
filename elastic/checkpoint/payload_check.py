"""Bytes of a checkpoint are used only if they match its commit record.

`check_state` and `read_state` accept the same payloads: those whose parts have the record's sha256
and whose state has its digest. Neither says whether the state fits a recipe's objects; only the
recipe can tell.
"""

from collections import deque
from collections.abc import Generator
from functools import partial

from elastic.checkpoint.record import CommitRecord
from elastic.errors import CheckpointDamaged
from elastic.snapshot.image_hash import ImageHash, Pieces, Source, run_all
from elastic.storage.store import ObjectNotFound, OutsideStore, Store, reading
from elastic.system.clock import Clock
from elastic.system.sealed_memory import SealedMemory


def check_state(store: Store, record: CommitRecord, clock: Clock) -> None:
    """Read a payload piece by piece, and keep none: it may be larger than this machine's memory.

    Raises CheckpointDamaged for a payload that a restore would not accept; StoreFailed.
    """
    reading(lambda: _check(partial(_payload_bytes, store, record), record), clock)


def read_state(store: Store, record: CommitRecord, clock: Clock) -> SealedMemory:
    """The image, sealed; the caller closes it.

    Raises as `check_state`; OSError where memory ends.
    """

    def whole() -> SealedMemory:
        try:
            memory = SealedMemory(record.size_bytes)
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


def _kept(memory: SealedMemory, store: Store, record: CommitRecord, start: int, end: int) -> Pieces:
    for piece in _payload_bytes(store, record, start, end):
        memory.write(start, piece)
        start += len(piece)
        yield piece


def _check(source: Source, record: CommitRecord) -> None:
    """Raises CheckpointDamaged, or what `source` raises."""
    found = ImageHash(source, record.size_bytes)
    run_all(found.tasks())
    for name, expected, actual in (
        ("sha256", record.sha256, found.parts_sha256()),
        ("digest", record.digest, found.digest()),
    ):
        if actual != expected:
            raise CheckpointDamaged(
                f"expected the payload {record.payload} to have {name} {expected[:16]}, found {actual[:16]}: its bytes were changed"
            )
    deque(source(record.size_bytes, record.size_bytes), maxlen=0)  # nothing follows


def _payload_bytes(store: Store, record: CommitRecord, start: int, end: int) -> Generator[bytes, None, None]:
    """The payload's bytes from `start` to `end`, all of them, in chunks.

    Where both are its end there are none, and more are looked for. Raises CheckpointDamaged where
    some are missing, or more follow the end; StoreFailed when the store does not answer.
    """
    at, follows = start, int(start == record.size_bytes)
    try:
        for chunk in store.read(record.payload, start, end + follows):
            at += len(chunk)
            if at > end:
                break
            yield chunk
    except ObjectNotFound as error:
        raise CheckpointDamaged(
            f"the payload {record.payload} is missing, its commit record is there"
        ) from error
    except OutsideStore as error:
        raise CheckpointDamaged(str(error)) from error
    if at != end:
        found = "more" if at > end else f"{at}" if at > start else f"at most {at}"
        raise CheckpointDamaged(
            f"the payload {record.payload} has {found} bytes, expected {record.size_bytes}"
        )
