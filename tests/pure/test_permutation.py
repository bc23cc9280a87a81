"""A keyed permutation: each number once, and any position by itself."""

from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import order_of

from elastic.data.order import SORTED_UP_TO
from elastic.data.random_keys import MASK, Permutation, bits, key, keyed_permutation

BILLION = 10**9
FROZEN = [746330226, 154646065, 719308709, 848370109]

keys = st.integers(0, MASK)


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


@given(keys, st.one_of(st.integers(1, 3000), st.integers(1, 2**62 - 1)), st.data())
def test_any_positions_are_those_of_one_number_at_a_time(purpose, size, data):
    """Also at sizes of which no array could be made: products and sums must stay within 64 bits. Of
    a small one all numbers come, each once.
    """
    of = keyed_permutation(purpose, size)
    if size <= 3000:
        assert sorted(of[np.arange(size)]) == list(range(size))
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    found = of[np.array(positions, dtype=np.int64)]
    assert found.dtype == np.int64
    assert found.tolist() == [one_by_one(of, each) for each in positions]


def test_the_numbers_are_what_they_always_were():
    """Frozen values: a run goes on in the order in which it began, under any later version."""
    of = keyed_permutation(key(7, "permutation", 0), BILLION)
    assert of[np.array([0, 1, 2, BILLION - 1])].tolist() == FROZEN


@pytest.mark.parametrize("samples", [SORTED_UP_TO, SORTED_UP_TO + 1])
def test_the_size_alone_decides_which_order_a_run_has(samples):
    order = order_of(samples, steps=1)
    assert isinstance(order.of_epoch(0), Permutation) == (samples > SORTED_UP_TO)
