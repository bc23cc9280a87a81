"""A key is a pure function of its purpose: equal words and numbers give equal 64 bits everywhere.

Neither a key nor a permutation depends on a machine or on the version of a library. The mixing is
SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA
2014), chained over the parts. It does not promise anything cryptographic.

A keyed permutation of the numbers below n gives any of its positions without the rest. It is a
Feistel network on the two digits of a number, of bases a and b, where a * b is n or just above it
(Black and Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002). A round adds a keyed hash
of one digit to the other, modulo its base, which can be taken back: so the network is a permutation
of a * b numbers, whatever the hash. What it puts at n or above goes through it again until it comes
out below n; fewer than one number in sqrt(n) does. Four rounds are told from a random permutation
by a chi-square test, and five are not (decision 0026); it has eight. Of a few numbers it
gives some permutations more often than others, so small data sets are sorted by keyed hashes
instead (order.py).
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 8


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit numbers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def key(*parts: int | str) -> int:
    """64 bits for a purpose, such as (seed, "order", epoch). Order and number of parts matter.

    Words enter by their sha256, numbers modulo 2**64.
    """
    return extended(0, *parts)


def extended(state: int, *parts: int | str) -> int:
    """The key of a purpose that goes on from that of its first parts."""
    for part in parts:
        state = mix((state + GOLDEN & MASK) ^ _mixed(part))
    return state


@lru_cache(maxsize=4096)  # steps make several keys each, of few parts
def _mixed(part: int | str) -> int:
    if isinstance(part, str):
        part = int.from_bytes(hashlib.sha256(part.encode()).digest()[:8])
    return mix(part + GOLDEN & MASK)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """keys: one for each round. size: n, from 1 on and below 2**62."""

    keys: tuple[int, ...]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [len(positions)]: the numbers at these positions, each in [0, n)."""
        numbers = self._through_network(positions.astype(np.uint64))
        # It ends: a number that starts below n comes back there, since its cycle leads to itself.
        while (outside := np.flatnonzero(numbers >= self.size)).size:
            numbers[outside] = self._through_network(numbers[outside])
        return numbers.astype(np.int64)

    def _through_network(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """uint64: a permutation of the numbers below a * b."""
        root = isqrt(self.size - 1) + 1
        low_base, high_base = np.uint64(-(-self.size // root)), np.uint64(root)
        high = numbers // low_base
        low = numbers - high * low_base
        for number, of_round in enumerate(self.keys):
            if number % 2 == 0:  # first the high one, which neighbours share
                high = (high + bits(of_round, low) % high_base) % high_base
            else:
                low = (low + bits(of_round, high) % low_base) % low_base
        return high * low_base + low


def keyed_permutation(purpose: int, size: int) -> Permutation:
    """purpose: a key, such as that of (seed, "permutation", epoch)."""
    return Permutation(keys=tuple(key(purpose, number) for number in range(ROUNDS)), size=size)
