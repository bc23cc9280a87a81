"""Draws with replacement, by weights: the i-th draw of an epoch is a function of (seed, epoch, i).

Weights become integers once, by a scale that is a power of two, and from there on all arithmetic is
that of integers: the inverse of the cumulative sum at a keyed 64-bit number. So the draws are the
same on every machine. A weight below 2**-(61 - log2(samples)) of the largest may become zero; a
sample of such a weight would not be drawn in any run's time.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from elastic.data.random_keys import bits, key

TOTAL_BITS = 62  # the cumulative sum stays below 2**62, within an int64


def cumulative(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64 [samples]: the sums of the scaled weights up to and with each sample.

    weights: float64 [samples], finite, none negative, not all zero.
    """
    _, exponent = np.frexp(weights.max())
    fractions = np.ldexp(weights, -int(exponent))  # exact, but where it falls below all doubles
    whole = np.rint(np.ldexp(fractions, TOTAL_BITS - len(weights).bit_length())).astype(np.int64)
    return np.cumsum(whole)


def draw(seed: int, sums: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
    """int64 [samples]: as many draws as there are samples."""
    words = bits(key(seed, "weights", epoch), np.arange(len(sums), dtype=np.uint64))
    drawn = np.searchsorted(sums, scaled(words, int(sums[-1])), side="right")
    return drawn.astype(np.int64)


def scaled(words: NDArray[np.uint64], total: int) -> NDArray[np.int64]:
    """floor(word * total / 2**64) of each word, in [0, total), for a total below 2**62.

    The product has 128 bits. It is put together from products of 32-bit halves, as by hand.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    high_total, low_total = np.uint64(total >> 32), np.uint64(total & 0xFFFFFFFF)
    high_word, low_word = words >> half, words & low
    middle = high_word * low_total + (low_word * low_total >> half)
    other = low_word * high_total + (middle & low)
    high: NDArray[np.uint64] = high_word * high_total + (middle >> half) + (other >> half)
    return high.astype(np.int64)


def sha256_of(sums: NDArray[np.int64]) -> str:
    """Equal for weights that draw alike."""
    return hashlib.sha256(sums.astype("<i8").tobytes()).hexdigest()[:16]
