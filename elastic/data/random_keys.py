"""A key is a pure function of its purpose: equal words and numbers give equal 64 bits everywhere.

It depends on no machine and on no version of any library. The mixing is SplitMix64's finaliser
(Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), chained over the
parts. It does not promise anything cryptographic.
"""

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit numbers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def key(*parts: int | str) -> int:
    """64 bits for a purpose, such as (seed, "order", epoch). Order and number of parts matter.

    Words enter by their sha256, numbers modulo 2**64.
    """
    state = 0
    for part in parts:
        mixed = _mixed_word(part) if isinstance(part, str) else mix(part + GOLDEN & MASK)
        state = mix((state + GOLDEN & MASK) ^ mixed)
    return state


@cache
def _mixed_word(word: str) -> int:
    return mix(int.from_bytes(hashlib.sha256(word.encode()).digest()[:8]) + GOLDEN & MASK)


def bits(base: NDArray[np.uint64] | int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64 words at the given counters of the stream(s) `base`; shapes broadcast."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        value = np.asarray(base, dtype=np.uint64) + (counters + np.uint64(1)) * np.uint64(GOLDEN)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
        return mixed


def uniform(base: int, samples: NDArray[np.int64], first_draw: int, count: int) -> NDArray[np.float32]:
    """float32 [len(samples), count] in [0, 1), from each sample's own stream under the key `base`.

    first_draw: how many numbers of each stream were drawn before.
    """
    streams = bits(base, samples.astype(np.uint64))[:, None]
    words = bits(streams, np.arange(first_draw, first_draw + count, dtype=np.uint64)[None, :])
    # A float32 holds 24 bits exactly; with more a value could round up to 1.
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
