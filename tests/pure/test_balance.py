"""Shards go to fast ranks, noise moves none, and a rank that recovers gets its own back."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.reduce.balance import Balance, Cost, best_split, least_seconds
from elastic.reduce.tree import span

SHARD_S = 0.05


def dumb_splits(ranks, shards):
    """All ways to give each rank a number of shards."""
    if ranks == 1:
        yield (shards,)
        return
    for first in range(shards + 1):
        for rest in dumb_splits(ranks - 1, shards - first):
            yield (first, *rest)


def slowest_s(costs, counts):
    return max(cost.seconds(count) for cost, count in zip(costs, counts, strict=True))


costs_of_ranks = st.lists(
    st.builds(Cost, st.floats(0, 5, allow_nan=False), st.floats(0.01, 5, allow_nan=False)),
    min_size=1,
    max_size=4,
)


@given(costs_of_ranks, st.integers(0, 4), st.booleans())
def test_no_split_is_faster_than_the_best_one(costs, extra, has_least):
    """Against a twin that tries all of them; the bound without whole shards is never above."""
    shards, least = len(costs) + extra, int(has_least)
    found = best_split(costs, shards, least=least)
    assert sum(found) == shards and min(found) >= least
    expected = min(
        slowest_s(costs, counts) for counts in dumb_splits(len(costs), shards) if min(counts) >= least
    )
    assert slowest_s(costs, found) == expected
    assert least_seconds(costs, shards) <= expected * (1 + 1e-9)


class Ranks:
    """Simulated ranks: a fixed part and so much for each shard, times a factor and noise."""

    def __init__(self, shards, factors, *, fixed_s=0.0, noise=0.02, seed=0, reads_ahead=0):
        equal = tuple(len(span(shards, len(factors), rank)) for rank in range(len(factors)))
        self.balance = Balance(equal, reads_ahead)
        self.shards, self.factors, self.fixed_s = shards, list(factors), fixed_s
        self.random, self.noise, self.step = random.Random(seed), noise, 0
        self.changes, self.counts = [], equal

    @property
    def costs(self):
        return [Cost(self.fixed_s, SHARD_S * factor) for factor in self.factors]

    def run(self, steps):
        """How many times as long as with the best split the last step takes, without noise."""
        for _ in range(steps):
            self.step += 1
            self.counts = self.balance.counts(self.step)
            noisy = (
                cost.seconds(count) * self.random.lognormvariate(0, self.noise)
                for cost, count in zip(self.costs, self.counts, strict=True)
            )
            if self.balance.add(self.step, tuple(noisy)) is not None:
                self.changes.append(self.step)
        costs = self.costs
        return slowest_s(costs, self.counts) / slowest_s(costs, best_split(costs, self.shards))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("shards", "ranks"), [(8, 2), (8, 4), (64, 2), (64, 8), (7, 3), (256, 32)])
@pytest.mark.parametrize("fixed_s", [0.0, 0.2])
def test_noise_alone_moves_no_shard(shards, ranks, fixed_s, seed):
    """A fifth of noise in each rank's seconds, for 2000 steps."""
    noisy = Ranks(shards, [1.0] * ranks, fixed_s=fixed_s, noise=0.2, seed=seed)
    noisy.run(2000)
    assert noisy.changes == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("shards", "ranks"), [(8, 2), (8, 4), (64, 2), (64, 8), (7, 3), (8, 8), (4, 4)])
@pytest.mark.parametrize("fixed_s", [0.0, 0.03])
@pytest.mark.parametrize("reads_ahead", [0, 8])
def test_a_rank_that_becomes_slow_has_fewer_shards_within_some_tens_of_steps(
    shards, ranks, fixed_s, reads_ahead, seed
):
    """Three times slower from step 41 on; then nothing moves any more but the rare probes."""
    some = Ranks(shards, [1.0] * ranks, fixed_s=fixed_s, noise=0.05, seed=seed, reads_ahead=reads_ahead)
    some.run(40)
    assert some.changes == []
    some.factors[ranks // 2] = 3.0
    assert some.run(100) <= 1.15
    few = len(some.changes)
    some.run(60)
    assert few <= 3 and len(some.changes) <= few + 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("shards", "ranks"), [(8, 2), (64, 8), (8, 8), (4, 4)])
def test_a_rank_that_is_fast_again_gets_its_shards_back(shards, ranks, seed):
    """Also where it had none, so that nothing was measured: a probe finds it."""
    some = Ranks(shards, [1.0] * ranks, fixed_s=0.03, noise=0.05, seed=seed)
    some.factors[0] = 6.0
    some.run(200)
    assert some.counts[0] < shards // ranks
    some.factors[0] = 1.0
    some.run(600)
    assert some.run(1) <= 1.15


def test_probes_of_a_rank_that_stays_slow_become_rare():
    """Each is in vain; together they cost little."""
    some = Ranks(4, [1.0, 1.0, 1.0, 20.0])
    some.run(8000)
    starts = some.changes[1::2]
    waits = [later - sooner for sooner, later in pairwise(starts)]
    assert some.counts[3] == 0 and waits == sorted(waits) and len(starts) <= 8


@given(st.data())
def test_any_seconds_give_splits_that_are_known_in_time(data):
    """Whatever ranks measure: all shards are there, and a split that was given stays."""
    ranks, reads_ahead = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 5))
    shards = ranks + data.draw(st.integers(0, 9))
    equal = tuple(len(span(shards, ranks, rank)) for rank in range(ranks))
    balance, given_out = Balance(equal, reads_ahead), {}
    seconds = st.one_of(st.floats(1e-9, 10), st.sampled_from([1e-9, 1.0, 3.0]))
    for step in range(1, 1 + data.draw(st.integers(1, 80))):
        for ahead in range(step, step + 1 + reads_ahead):
            counts = balance.counts(ahead)
            assert sum(counts) == shards and min(counts) >= 0
            assert given_out.setdefault(ahead, counts) == counts
        own_s = data.draw(st.none() | st.tuples(*[seconds] * ranks))
        balance.add(step, own_s)
