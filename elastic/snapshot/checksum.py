"""A flipped bit, a torn or a missing part changes the checksum of an image, or of a tensor.

It does not promise to notice changes that cancel within one stretch, as words that change places
there do, nor those of a forger.

A state has three fingerprints, each for one question:

- The *digest* (image_hash.py): sha256 of the state in a canonical order, wherever its
  tensors lie in an image. It stands in commit records and tells whether two runs ended with the
  same state.
- The checksum of an *image* (`of_image`, `ImageChecksum`, here): one pass over an image as it lies
  in a slot. It tells whether a snapshot is still what was written, and whether two nodes hold the
  same one.
- The checksum of a *state* (`checksum_of`, train/state/flat.py), entry by entry, over `tensor_sums`
  (here). It tells whether two ranks train the same state, and which entry differs first.

A payload in storage has a sha256 of its parts besides (image_hash.py), because storage may be
written by anyone.

Checksums are sums of 64-bit words: one pass at the speed of memory, where sha256 would cost a tenth
of a step. Each stretch is summed by itself, so that parts that changed places are noticed. It
imports no torch: the uploader uses it too.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

STRETCHES = 64
WORD_BYTES = 8
SMALL_BYTES = 4096
# A block is summed right before it is copied, so that it is read from memory once. A larger block
# does not stay in the processor's cache, a smaller one costs a call more.
LARGEST_BLOCK_BYTES = 1 << 22
_WORDS = 1 << 64

Bytes = NDArray[np.uint8]


class Sliceable(Protocol):
    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Any: ...


Piece = TypeVar("Piece", bound=Sliceable)


class ImageChecksum:
    """The checksum of an image whose pieces are added in any order, each once."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        share = size_bytes // STRETCHES // SMALL_BYTES * SMALL_BYTES
        self._block_bytes = min(max(share, SMALL_BYTES), LARGEST_BLOCK_BYTES)
        self._sums = [0] * (size_bytes // self._block_bytes + 1)

    def pieces(self, offset: int, data: Piece) -> Iterator[tuple[int, Piece]]:
        """`data`, which belongs at `offset`, as (offset, piece), cut where image blocks begin.

        data: bytes, in an array of this or another library.
        """
        at = 0
        while at < data.nbytes:
            end = at + self._block_bytes - (offset + at) % self._block_bytes
            yield offset + at, data[at:end]
            at = end

    def add(self, offset: int, piece: Bytes) -> None:
        """Add one of `pieces`.

        offset: a multiple of 8 bytes. piece: whole words, except at the end of the image.
        """
        end = piece.nbytes // WORD_BYTES * WORD_BYTES
        words = int(np.add.reduce(piece[:end].view(np.uint64)))  # wraps around
        rest = int.from_bytes(piece[end:].tobytes(), "little")
        self.add_sum(offset, words + rest)

    def add_sum(self, offset: int, words: int) -> None:
        """Add one of `pieces` whose 64-bit words were summed elsewhere."""
        block = offset // self._block_bytes
        self._sums[block] = (self._sums[block] + words) % _WORDS

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        words = (*self._sums, self._size_bytes)
        return hashlib.sha256(b"".join(each.to_bytes(WORD_BYTES, "little") for each in words)).hexdigest()


def of_image(image: memoryview) -> str:
    """64 hexadecimal digits."""
    found = ImageChecksum(image.nbytes)
    for offset, piece in found.pieces(0, np.frombuffer(image, dtype=np.uint8)):
        found.add(offset, piece)
    return found.hexdigest()


def tensor_sums(data: memoryview) -> bytes:
    """The bytes themselves if they are few, else the sums of their stretches and the rest."""
    size = data.nbytes
    if size <= SMALL_BYTES:
        return bytes(data)
    words, cut = stretch_words(size)
    stretches = np.frombuffer(data, dtype=np.int64, count=words * STRETCHES).reshape(STRETCHES, words)
    total: bytes = stretches.sum(axis=1).tobytes()  # wraps around
    return total + bytes(data[cut:])


def stretch_words(size_bytes: int) -> tuple[int, int]:
    """(words of one stretch, bytes of all stretches)."""
    words = size_bytes // (STRETCHES * WORD_BYTES)
    return words, words * STRETCHES * WORD_BYTES
