"""Two images, or two tensors, with the same checksum are the same, unless somebody made them differ on purpose.

Sums of 64-bit words, which an optimizer step does not notice where sha256 would cost a tenth of it: one pass at the speed of memory. Each of some 64 stretches is summed by
itself, so that parts which changed places are noticed. What is stored for good has a sha256 instead. It imports no torch: the uploader uses it too.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

STRETCHES = 64
WORD_BYTES = 8
SMALL_BYTES = 4096
# What is summed right before it is copied is read from memory once; larger pieces do not stay in the cache, smaller ones cost a call each.
LARGEST_BLOCK_BYTES = 1 << 22
_WORDS = 1 << 64

Bytes = NDArray[np.uint8]


class ImageSum:
    """The checksum of an image of which one piece after the other is added, in any order, each once."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        share = size_bytes // STRETCHES // SMALL_BYTES * SMALL_BYTES
        self._block_bytes = min(max(share, SMALL_BYTES), LARGEST_BLOCK_BYTES)
        self._sums = [0] * (size_bytes // self._block_bytes + 1)

    def pieces(self, offset: int, data: Bytes) -> Iterator[tuple[int, Bytes]]:
        """`data`, which belongs at `offset`, cut where blocks of the image begin."""
        at = 0
        while at < data.nbytes:
            end = at + self._block_bytes - (offset + at) % self._block_bytes
            yield offset + at, data[at:end]
            at = end

    def add(self, offset: int, piece: Bytes) -> None:
        """One of `pieces`. offset: a multiple of 8 bytes; whole words, but for the end of the image."""
        end = piece.nbytes // WORD_BYTES * WORD_BYTES
        words = int(np.add.reduce(piece[:end].view(np.uint64)))  # wraps around
        rest = int.from_bytes(piece[end:].tobytes(), "little")
        block = offset // self._block_bytes
        self._sums[block] = (self._sums[block] + words + rest) % _WORDS

    def digest(self) -> str:
        """64 hexadecimal digits."""
        words = (*self._sums, self._size_bytes)
        return hashlib.sha256(b"".join(each.to_bytes(WORD_BYTES, "little") for each in words)).hexdigest()


def of_image(image: memoryview) -> str:
    """64 hexadecimal digits."""
    found = ImageSum(image.nbytes)
    for offset, piece in found.pieces(0, np.frombuffer(image, dtype=np.uint8)):
        found.add(offset, piece)
    return found.digest()


def sums(data: memoryview) -> bytes:
    """What stands for the bytes: themselves where there are few, else the sums of their stretches and the few bytes after them."""
    size = data.nbytes
    if size <= SMALL_BYTES:
        return bytes(data)
    words, cut = stretch_words(size)
    stretches = np.frombuffer(data, dtype=np.int64, count=words * STRETCHES).reshape(STRETCHES, words)
    total: bytes = stretches.sum(axis=1).tobytes()  # wraps around
    return total + bytes(data[cut:])


def stretch_words(size_bytes: int) -> tuple[int, int]:
    """(words of one stretch, bytes of all of them)."""
    words = size_bytes // (STRETCHES * WORD_BYTES)
    return words, words * STRETCHES * WORD_BYTES
