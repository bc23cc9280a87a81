"""A keyed permutation of the numbers below n gives any of its positions without the rest.

It is a Feistel network on the two digits of a number, of bases a and b, where a * b is n or just
above it (Black and Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002). A round adds a
keyed hash of one digit to the other, modulo its base, which can be taken back: so the network is a
permutation of a * b numbers, whatever the hash. What it puts at n or above goes through it again
until it comes out below n; fewer than one number in sqrt(n) does.

Four rounds are told from a random permutation by a chi-square test, and five are not
(test_permutation.py); it has eight. Like the keys it does not promise anything cryptographic. Of a
few numbers it gives some permutations more often than others, so small data sets are sorted by
keyed hashes instead (order.py).
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from elastic.data.random_keys import bits, key

ROUNDS = 8


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
