"""A snapshot is hashed while it is written, and what is committed are hashes of what was published.

It does not promise that the bytes stay the same between the two: storage is compared with the
hashes whenever it is read.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from elastic.checkpoint.record import Hashes
from elastic.errors import StoreFailed
from elastic.snapshot.checksum import ImageChecksum
from elastic.snapshot.image_hash import ImageHash, Pieces, in_memory
from elastic.snapshot.slots import SnapshotInfo
from elastic.system.parallel import Task, num_threads, run_all


@contextmanager
def hash_beside(image: memoryview, info: SnapshotInfo) -> Iterator[Callable[[], Hashes]]:
    """A context in which an image is hashed; leaving it ends that.

    image: uint8 [size_bytes], in a slot that is leased for as long. info: what stands beside it,
    with the checksum that it was published with. Yields a call that waits for the hashes; it raises
    StoreFailed where the image is not what was published, CheckpointDamaged where it is none.
    """
    is_over = threading.Event()
    with ThreadPoolExecutor(1, f"hash-{info.step}") as thread:
        hashing = thread.submit(_hashes, image, info, is_over)
        try:
            yield hashing.result
        finally:
            is_over.set()


def _hashes(image: memoryview, info: SnapshotInfo, is_over: threading.Event) -> Hashes:
    def pieces(start: int, end: int) -> Pieces:
        for piece in in_memory(image)(start, end):
            if is_over.is_set():
                raise StoreFailed(f"the save of step {info.step} ended before it was hashed")
            yield piece

    def summed() -> Task:
        for offset, piece in checksum.pieces(0, np.frombuffer(image, dtype=np.uint8)):
            checksum.add(offset, piece)
            yield

    hashes, checksum = ImageHash(pieces, image.nbytes), ImageChecksum(image.nbytes)
    run_all([summed(), *hashes.tasks()], num_threads())
    if info.checksum not in ("", checksum.hexdigest()):
        raise StoreFailed(f"the snapshot of step {info.step} changed in memory before it was saved")
    return Hashes(digest=hashes.digest(), sha256=hashes.parts_sha256(), checksum=checksum.hexdigest())
