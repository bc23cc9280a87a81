"""A keyed permutation: each number once, any position by itself, and as random as a shuffle."""

from itertools import pairwise
from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from elastic.data.order import SORTED_UP_TO, Tail
from elastic.data.random_keys import MASK, ROUNDS, Permutation, bits, key, keyed_permutation
from elastic.data.sampling import Sampling

BILLION = 10**9
FROZEN = [746330226, 154646065, 719308709, 848370109]

keys = st.integers(0, MASK)


def whole(of: Permutation) -> np.ndarray:
    return of[np.arange(len(of))]


def one_by_one(of: Permutation, position: int) -> int:
    """The dumb twin: Python's integers, one number, no array."""
    high_base = isqrt(of.size - 1) + 1
    low_base = -(-of.size // high_base)
    number = position
    while True:
        high, low = divmod(number, low_base)
        for place, of_round in enumerate(of.keys):
            word = int(bits(of_round, np.array([high if place % 2 else low], dtype=np.uint64))[0])
            if place % 2:
                low = (low + word) % low_base
            else:
                high = (high + word) % high_base
        number = high * low_base + low
        if number < of.size:
            return number


def test_every_size_up_to_some_thousands_gives_each_number_once():
    """All of them, so that no size is left out at which the digits do not fit."""
    for size in range(1, 3000):
        assert (np.bincount(whole(keyed_permutation(size, size)), minlength=size) == 1).all()


@given(keys, st.one_of(st.integers(1, 40), st.integers(1, 2**62 - 1)), st.data())
def test_any_positions_are_those_of_one_number_at_a_time(purpose, size, data):
    """Also at sizes of which no array could be made: products and sums must stay within 64 bits."""
    of = keyed_permutation(purpose, size)
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    found = of[np.array(positions, dtype=np.int64)]
    assert found.dtype == np.int64
    assert found.tolist() == [one_by_one(of, each) for each in positions]


def test_the_numbers_are_what_they_always_were():
    """Frozen values: a run goes on in the order in which it began, under any later version."""
    of = keyed_permutation(key(7, "permutation", 0), BILLION)
    assert of[np.array([0, 1, 2, BILLION - 1])].tolist() == FROZEN


def differences(several: list[np.ndarray], lag: int) -> float:
    """Modulo the size; equal numbers are a lag apart in no permutation, so 0 does not occur."""
    size = len(several[0])
    found = np.concatenate([(each[lag:] - each[:-lag]) % size for each in several])
    edges = np.linspace(1, size, 101).round()  # 1 to size - 1; of whole numbers a block has these many
    expected = np.array([stop - start for start, stop in pairwise(edges)]) / (size - 1) * len(found)
    return float(stats.chisquare(np.histogram(found, bins=edges - 0.5)[0], expected).pvalue)


@pytest.mark.parametrize(("rounds", "is_random"), [(ROUNDS, True), (4, False)])
def test_differences_of_a_row_are_those_of_a_shuffle(rounds, is_random):
    """A small one is the hardest case: the fewer digits there are, the less a round can mix. The
    seeds are fixed, and four rounds must fail.
    """
    several = [
        whole(Permutation(keys=tuple(key(epoch, each) for each in range(rounds)), size=2401))
        for epoch in range(60)
    ]
    assert (differences(several, lag=49) > 1e-4) == is_random


@pytest.mark.parametrize("samples", [SORTED_UP_TO, SORTED_UP_TO + 1])
def test_the_size_alone_decides_which_order_a_run_has(samples):
    chosen = Sampling(epochs=None, steps=1, tail=Tail.DROP.value, weights=None, order=None)
    order = chosen.order_of(samples=samples, seed=1, global_batch=8, shards=8)
    assert isinstance(order.of_epoch(0), Permutation) == (samples > SORTED_UP_TO)
