"""A keyed permutation: each number once, any position by itself, and as random as a shuffle.

The tests of randomness have fixed seeds, so that they pass always or never. Each is also told what
a weaker network gives: with four rounds at least one of them must fail.
"""

import tracemalloc
from itertools import pairwise
from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from elastic.data.order import SORTED_UP_TO, Tail
from elastic.data.permutation import ROUNDS, Permutation, keyed_permutation
from elastic.data.random_keys import MASK, bits, key
from elastic.data.sampling import Sampling

BILLION = 10**9
FROZEN = [746330226, 154646065, 719308709, 848370109]
LEAST_P = 1e-4  # of a test with a fixed seed; of two dozen such tests one in 400 would fail by chance
BLOCKS = 12

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


def pairs(several: list[np.ndarray], lag: int) -> float:
    """Numbers whose positions are so far apart, in blocks: nothing of one tells of the other."""
    first = np.concatenate([each[:-lag] for each in several])
    second = np.concatenate([each[lag:] for each in several])
    size = len(several[0])
    counts = np.histogram2d(first, second, bins=BLOCKS, range=[[0, size], [0, size]])[0]
    return float(stats.chisquare(counts.reshape(-1)).pvalue)


def differences(several: list[np.ndarray], lag: int) -> float:
    """Modulo the size; equal numbers are a lag apart in no permutation, so 0 does not occur."""
    size = len(several[0])
    found = np.concatenate([(each[lag:] - each[:-lag]) % size for each in several])
    edges = np.linspace(1, size, 101).round()  # 1 to size - 1; of whole numbers a block has these many
    expected = np.array([stop - start for start, stop in pairwise(edges)]) / (size - 1) * len(found)
    return float(stats.chisquare(np.histogram(found, bins=edges - 0.5)[0], expected).pvalue)


def squares(several: list[np.ndarray], row: int) -> float:
    """Sums over the corners of small squares of positions vanish as often as by chance.

    Few rounds add to each digit what depends on the other alone, which such a sum takes out.
    """
    size = len(several[0])
    sums = [each[: -row - 1] - each[1:-row] - each[row:-1] + each[row + 1 :] for each in several]
    found = sum(int((each % size == 0).sum()) for each in sums)
    expected = sum(map(len, sums)) / size
    return 2 * min(stats.poisson.cdf(found, expected), stats.poisson.sf(found - 1, expected))


def test_a_billion_samples_need_no_memory():
    """Steps anywhere in the run, with all that their batches need, and one batch padded."""
    chosen = Sampling(epochs=3, steps=None, tail="pad", weights=None, order=None)
    order = chosen.order_of(samples=BILLION, seed=1, global_batch=384, shards=8)
    tracemalloc.start()
    for step in (1, 2, order.steps_per_epoch, order.steps_per_epoch + 1, order.steps):
        epoch, batch_in_epoch = order.position(step)
        of_epoch = order.of_epoch(epoch)
        batch = order.batch(of_epoch, batch_in_epoch)
        assert order.batch(order.streams(of_epoch), batch_in_epoch).tolist() == batch.tolist()
        assert len(set(batch.tolist())) == 384
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def chances(size: int, rounds: int, epochs: int) -> list[float]:
    several = [
        whole(Permutation(keys=tuple(key(epoch, each) for each in range(rounds)), size=size))
        for epoch in range(epochs)
    ]
    row = -(-size // (isqrt(size - 1) + 1))  # the numbers of one high digit
    lags = (1, 2, row, row + 1)
    return [
        squares(several, row),
        *(pairs(several, lag) for lag in lags),
        *(differences(several, lag) for lag in lags),
    ]


def test_no_test_of_randomness_tells_it_from_a_shuffle():
    """A small one is the hardest case: the fewer digits there are, the less a round can mix."""
    assert min(chances(2401, ROUNDS, 60)) > LEAST_P
    assert min(chances(2401, 4, 60)) < 1e-12


@pytest.mark.parametrize("samples", [SORTED_UP_TO, SORTED_UP_TO + 1])
def test_the_size_alone_decides_which_order_a_run_has(samples):
    chosen = Sampling(epochs=None, steps=1, tail=Tail.DROP.value, weights=None, order=None)
    order = chosen.order_of(samples=samples, seed=1, global_batch=8, shards=8)
    assert isinstance(order.of_epoch(0), Permutation) == (samples > SORTED_UP_TO)
