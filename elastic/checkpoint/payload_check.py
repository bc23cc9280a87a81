"""Bytes of a checkpoint are used only if they match its commit record.

`check_state` and `read_state` accept the same payloads: those with the record's sha256, and those
of a whole state with its digest. Neither says whether the state fits a recipe's objects; only the
recipe can tell.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator
from functools import partial

from elastic.checkpoint.record import CommitRecord, Stored
from elastic.errors import CheckpointDamaged
from elastic.snapshot import safetensors_header
from elastic.snapshot.division import Joined, joined
from elastic.snapshot.image_hash import ImageHash, Pieces, Source, run_all
from elastic.snapshot.safetensors_header import Header
from elastic.storage.store import ObjectNotFound, OutsideStore, Store, reading
from elastic.system.clock import Clock
from elastic.system.sealed_memory import SealedMemory

# Takes bytes of the image of a whole state, and where they begin in it; from several threads.
Keep = Callable[[int, memoryview], object]


def check_state(
    store: Store, record: CommitRecord, clock: Clock, keeps: Callable[[Header], Keep] | None = None
) -> None:
    """Read a payload piece by piece, and keep none: it may be larger than this machine's memory.

    keeps: called with the header of the image of the whole state, gives what takes all that is
    read, before it is known to be right. Raises CheckpointDamaged for a payload that a restore
    would not accept; StoreFailed.
    """
    placed: list[Callable[[int, memoryview], object]] = []
    has_to_join = keeps is not None or record.parts
    whole = reading(partial(join, store, record), clock) if has_to_join else None
    if keeps is not None and whole is not None:
        keep = keeps(safetensors_header.parse(whole.head, whole.size_bytes))
        placed = [partial(_keep_placed, whole.places(number), keep) for number in range(len(record.payloads))]
    for number, stored in enumerate(record.payloads):
        source = source_of(store, stored)
        reading(partial(_check, tee(source, placed[number]) if placed else source, stored), clock)


def _keep_placed(places: list[tuple[int, int, int]], keep: Keep, at: int, piece: memoryview) -> None:
    """places: as Joined.places."""
    end = at + len(piece)
    for start, size_bytes, there in places[max(0, bisect_right(places, (at, 0, 0)) - 1) :]:
        if start >= end:
            break
        if own := piece[max(0, start - at) : max(0, start + size_bytes - at)]:
            keep(there + max(0, at - start), own)


def read_state(store: Store, stored: Stored, clock: Clock) -> SealedMemory:
    """An image, sealed; the caller closes it.

    Raises as `check_state`; OSError where memory ends.
    """

    def whole() -> SealedMemory:
        try:
            memory = SealedMemory(stored.size_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise CheckpointDamaged(
                f"the payload {stored.name} should have {stored.size_bytes} bytes, more than this process can hold"
            ) from error
        try:
            _check(tee(source_of(store, stored), memory.write), stored)
            memory.seal()
        except BaseException:
            memory.close()
            raise
        return memory

    return reading(whole, clock)


def join(store: Store, record: CommitRecord) -> Joined:
    """The image of the whole state, from the headers of its parts; one that is not cut is the same.

    Raises CheckpointDamaged, StoreFailed.
    """
    return joined([ImageHash(source_of(store, each), each.size_bytes).header for each in record.payloads])


def digest_of(store: Store, record: CommitRecord, clock: Clock) -> str:
    """That of the state, for which parts are read. Raises CheckpointDamaged, StoreFailed."""

    def found() -> str:
        whole = join(store, record)
        source = whole.source([source_of(store, each) for each in record.payloads])
        hashed = ImageHash(source, whole.size_bytes)
        run_all(hashed.tasks())
        return hashed.digest()

    return record.digest or reading(found, clock)


def source_of(store: Store, stored: Stored) -> Source:
    return partial(_payload_bytes, store, stored)


def tee(source: Source, keep: Keep) -> Source:
    """Whose pieces are also kept, each at its place."""

    def pieces(start: int, end: int) -> Pieces:
        for piece in source(start, end):
            keep(start, memoryview(piece))
            start += len(piece)
            yield piece

    return pieces


def _check(source: Source, stored: Stored) -> None:
    """Raises CheckpointDamaged, or what `source` raises."""
    found = ImageHash(source, stored.size_bytes)
    run_all(found.tasks())
    hashes = [("sha256", stored.sha256, found.parts_sha256)]
    if stored.digest:
        hashes.append(("digest", stored.digest, found.digest))
    for name, expected, computed in hashes:
        if (actual := computed()) != expected:
            raise CheckpointDamaged(
                f"expected the payload {stored.name} to have {name} {expected[:16]}, found {actual[:16]}: its bytes were changed"
            )
    deque(source(stored.size_bytes, stored.size_bytes), maxlen=0)  # nothing follows


def _payload_bytes(store: Store, stored: Stored, start: int, end: int) -> Generator[bytes, None, None]:
    """The payload's bytes from `start` to `end`, all of them, in chunks.

    Where both are its end there are none, and more are looked for. Raises CheckpointDamaged where
    some are missing, or more follow the end; StoreFailed when the store does not answer.
    """
    at, follows = start, int(start == stored.size_bytes)
    try:
        for chunk in store.read(stored.name, start, end + follows):
            at += len(chunk)
            if at > end:
                break
            yield chunk
    except ObjectNotFound as error:
        raise CheckpointDamaged(
            f"the payload {stored.name} is missing, its commit record is there"
        ) from error
    except OutsideStore as error:
        raise CheckpointDamaged(str(error)) from error
    if at != end:
        found = "more" if at > end else f"{at}" if at > start else f"at most {at}"
        raise CheckpointDamaged(f"the payload {stored.name} has {found} bytes, expected {stored.size_bytes}")
