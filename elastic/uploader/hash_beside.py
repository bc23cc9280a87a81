"""A snapshot is hashed while it is written, and what is committed are hashes of what was published.

It does not promise that the bytes stay the same between the two: storage is compared with the
hashes whenever it is read.
"""

import threading
from types import TracebackType
from typing import Self

import numpy as np

from elastic.checkpoint.record import Hashes
from elastic.errors import StoreFailed
from elastic.snapshot.checksum import ImageChecksum
from elastic.snapshot.image_hash import ImageHash, Pieces, in_memory
from elastic.snapshot.slots import SnapshotInfo
from elastic.system.parallel import Task, num_threads, run_all


class HashBeside:
    """A context in which an image is hashed; leaving it ends that.

    image: uint8 [size_bytes], in a slot that is leased for as long.
    """

    def __init__(self, image: memoryview, info: SnapshotInfo) -> None:
        """info: what stands beside the image, with the checksum that it was published with."""
        self._image = image
        self._info = info
        self._found: Hashes | BaseException | None = None
        self._is_over = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        thread = threading.Thread(target=self._run, daemon=True, name=f"hash-{self._info.step}")
        try:
            thread.start()
        except RuntimeError:  # a limit of processes: `result` hashes
            return self
        self._thread = thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._thread is not None:
            self._thread.join()

    def result(self) -> Hashes:
        """Raises StoreFailed where the image is not what was published, CheckpointDamaged where it
        is none.
        """
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None, "it was not left before"
        return self._found

    def _run(self) -> None:
        try:
            hashes = ImageHash(self._pieces, self._image.nbytes)
            checksum = ImageChecksum(self._image.nbytes)
            run_all([self._add_to(checksum), *hashes.tasks()], num_threads())
            if self._info.checksum not in ("", checksum.hexdigest()):
                raise StoreFailed(
                    f"the snapshot of step {self._info.step} changed in memory before it was saved"
                )
            self._found = Hashes(digest=hashes.digest(), sha256=hashes.parts_sha256())
        except BaseException as error:
            # The edge of a thread: a save that waits for the hashes must have an answer.
            self._found = error

    def _pieces(self, start: int, end: int) -> Pieces:
        for piece in in_memory(self._image)(start, end):
            if self._is_over:
                raise StoreFailed(f"the save of step {self._info.step} ended before it was hashed")
            yield piece

    def _add_to(self, checksum: ImageChecksum) -> Task:
        for offset, piece in checksum.pieces(0, np.frombuffer(self._image, dtype=np.uint8)):
            checksum.add(offset, piece)
            yield
