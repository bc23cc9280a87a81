"""Shards go to fast ranks, noise moves none, and a rank that recovers gets its own back."""

import random
from operator import mul
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import groups_of

from elastic.reduce.balance import Balance, best_split
from elastic.reduce.tree import span
from elastic.train.loop.loop import Loop

SHARD_S = 0.05


def dumb_splits(ranks, shards):
    """All ways to give each rank a shard at least."""
    if ranks == 1:
        yield (shards,)
        return
    for first in range(1, shards - ranks + 2):
        for rest in dumb_splits(ranks - 1, shards - first):
            yield (first, *rest)


def slowest_s(shard_s, counts, fixed_s=0.0):
    return fixed_s + max(map(mul, shard_s, counts))


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=4), st.integers(0, 4))
def test_no_split_is_faster_than_the_best_one(shard_s, extra):
    """Against a twin that tries all of them."""
    shards = len(shard_s) + extra
    found = best_split(shard_s, shards)
    assert sum(found) == shards and min(found) >= 1
    best_s = min(slowest_s(shard_s, each) for each in dumb_splits(len(shard_s), shards))
    assert slowest_s(shard_s, found) == best_s


class Ranks:
    """Simulated ranks: a fixed part and so much for each shard, times a factor and noise."""

    def __init__(self, shards, ranks, *, fixed_s, noise, seed, reads_ahead=0):
        equal = tuple(len(span(shards, ranks, rank)) for rank in range(ranks))
        self.balance = Balance(equal, reads_ahead)
        self.shards, self.factors, self.fixed_s = shards, [1.0] * ranks, fixed_s
        self.random, self.noise, self.step = random.Random(seed), noise, 0
        self.changes, self.counts = [], equal

    def run(self, steps):
        """How many times as long as with the best split the last step takes, without noise."""
        for _ in range(steps):
            self.step += 1
            self.counts = self.balance.counts(self.step)
            shard_s = [SHARD_S * factor for factor in self.factors]
            noisy = (
                (self.fixed_s + count * seconds) * self.random.lognormvariate(0, self.noise)
                for count, seconds in zip(self.counts, shard_s, strict=True)
            )
            if self.balance.add(self.step, tuple(noisy)) is not None:
                self.changes.append(self.step)
        best = best_split(shard_s, self.shards)
        return slowest_s(shard_s, self.counts, self.fixed_s) / slowest_s(shard_s, best, self.fixed_s)


WORLDS = [(8, 2), (64, 8), (7, 3), (256, 32)]


@pytest.mark.parametrize(("shards", "ranks"), WORLDS)
@pytest.mark.parametrize(("fixed_s", "reads_ahead"), [(0.0, 8), (0.03, 0)])
def test_a_slow_rank_has_fewer_shards_until_it_is_fast_again(shards, ranks, fixed_s, reads_ahead):
    """Three times slower from step 41 on; between the two changes nothing moves. A fifth of noise
    in each rank's seconds moves no shard in 2000 steps.
    """
    for seed in range(3):
        noisy = Ranks(shards, ranks, fixed_s=fixed_s, noise=0.2, seed=seed)
        noisy.run(2000)
        assert noisy.changes == []
        some = Ranks(shards, ranks, fixed_s=fixed_s, noise=0.05, seed=seed, reads_ahead=reads_ahead)
        some.run(40)
        assert some.changes == []
        some.factors[ranks // 2] = 3.0
        assert some.run(120) <= 1.15
        few = len(some.changes)
        some.run(60)
        assert few <= 3 and len(some.changes) == few
        some.factors[ranks // 2] = 1.0
        assert some.run(200) <= 1.15


@given(st.integers(2, 4), st.integers(0, 5), st.integers(0, 9), st.integers(0, 2**32))
def test_any_seconds_give_splits_that_are_known_in_time(ranks, reads_ahead, spare, seed):
    """Whatever ranks measure: all shards are there, and a split that was given stays."""
    shards, draw = ranks + spare, random.Random(seed)
    equal = tuple(len(span(shards, ranks, rank)) for rank in range(ranks))
    balance, given_out = Balance(equal, reads_ahead), {}
    for step in range(1, 121):
        if step % 40 == 1:
            speeds = [draw.choice([1e-9, 1.0, 3.0]) for _ in equal]
        for ahead in range(step, step + 1 + reads_ahead):
            counts = balance.counts(ahead)
            assert sum(counts) == shards and min(counts) >= 1
            assert given_out.setdefault(ahead, counts) == counts
        balance.add(step, draw.choice([None, *[[draw.uniform(1e-9, each) for each in speeds]] * 9]))


def agreed(member, of_ranks):
    """How far ahead this rank knows its split, where it has one of its own."""
    link = SimpleNamespace(options=SimpleNamespace(balance=of_ranks[member.rank]))
    of_steps = SimpleNamespace(exchange=SimpleNamespace(spans=[range(4), range(4, 8)]))
    state = SimpleNamespace(sharded=None)
    parts = SimpleNamespace(link=link, groups=groups_of(member), trace=None, state=state)
    found = Loop._balance_of(SimpleNamespace(parts=parts, _of_steps=of_steps), reads_ahead=member.rank)
    return found and found._lead


@pytest.mark.parametrize(("of_ranks", "lead"), [(["auto", "auto"], 2), (["auto", "off"], None)])
def test_ranks_agree_whether_and_how_early_shards_move(ranks, of_ranks, lead):
    """Nodes that cut differently would wait for each other for ever, or add up other shards."""
    assert ranks.run(2, agreed, of_ranks) == [lead] * 2
