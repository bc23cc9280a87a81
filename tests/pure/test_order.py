"""Every sample is trained exactly once per epoch, at every world size and after every resume."""

from collections import Counter

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic.data.order import SampleOrder, Tail
from elastic.data.random_keys import bits, key, uniform
from elastic.reduce.tree import span

FROZEN = [[1, 9, 3, 4, 7, 8, 5, 6, 2, 0], [7, 2, 3, 1, 4, 5, 9, 0, 6, 8]]


@st.composite
def orders(draw, tail=None):
    shards = draw(st.integers(1, 9))
    order = SampleOrder(
        seed=draw(st.integers(0, 2**64)),
        samples=draw(st.integers(1, 60)),
        global_batch=shards * draw(st.integers(1, 4)),
        shards=shards,
        epochs=draw(st.integers(1, 3)),
        tail=draw(st.sampled_from(Tail)) if tail is None else tail,
    )
    assume(order.steps > 0)
    return order


def global_batch(order, step):
    """The samples of one step, computed from nothing but the step."""
    epoch, batch_in_epoch = order.position(step)
    return order.batch(order.permutation(epoch), batch_in_epoch)


def trained(order, steps, world_size):
    """What the ranks of a world of this size train on in these steps, shard by shard."""
    samples = []
    for step in steps:
        batch = global_batch(order, step)
        for rank in range(world_size):
            samples += [
                i for shard in span(order.shards, world_size, rank) for i in order.shard(batch, shard)
            ]
    return samples


def epoch_steps(order, epoch):
    return range(epoch * order.steps_per_epoch + 1, (epoch + 1) * order.steps_per_epoch + 1)


@given(orders(Tail.DROP))
def test_drop_trains_no_sample_twice_and_leaves_out_less_than_a_batch(order):
    """Counts every sample of every epoch, at every world size."""
    for epoch in range(order.epochs):
        for world_size in range(1, order.shards + 1):
            counts = Counter(trained(order, epoch_steps(order, epoch), world_size))
            assert set(counts.values()) == {1}
            assert order.samples - len(counts) == order.samples % order.global_batch


@given(orders(Tail.PAD))
def test_pad_trains_every_sample_and_repeats_only_to_fill_the_last_batch(order):
    """Counts every sample of every epoch; those that come twice start the same epoch's order."""
    for epoch in range(order.epochs):
        for world_size in range(1, order.shards + 1):
            samples = trained(order, epoch_steps(order, epoch), world_size)
            assert set(samples) == set(range(order.samples))
            assert 0 <= len(samples) - order.samples < order.global_batch
            assert (
                samples[order.samples :]
                == (samples[: order.samples] * order.global_batch)[: len(samples) - order.samples]
            )


@given(orders(), st.data())
def test_a_change_of_world_size_at_any_step_loses_and_repeats_nothing(order, data):
    """Interrupt anywhere, go on with another number of ranks: together they trained what one rank
    trains without a stop.
    """
    stop = data.draw(st.integers(0, order.steps))
    before, after = (data.draw(st.integers(1, order.shards)) for _ in range(2))
    resumed = trained(order, range(1, stop + 1), before) + trained(
        order, range(stop + 1, order.steps + 1), after
    )
    assert resumed == trained(order, range(1, order.steps + 1), 1)


@given(orders())
def test_shards_of_all_ranks_are_the_batch(order):
    """The union over ranks, in rank order, is the global batch itself, for every world size."""
    batch = global_batch(order, order.steps).tolist()
    for world_size in range(1, order.shards + 1):
        assert trained(order, [order.steps], world_size) == batch
    assert len(batch) == order.global_batch


@given(orders(), st.data())
def test_a_batch_depends_on_seed_and_step_alone(order, data):
    """In any order, by an order of other epochs and shards: neither the number of epochs nor
    earlier calls count.
    """
    step = data.draw(st.integers(1, order.steps))
    expected = global_batch(order, step)
    longer = SampleOrder(
        seed=order.seed,
        samples=order.samples,
        global_batch=order.global_batch,
        shards=1,
        epochs=order.epochs + 5,
        tail=order.tail,
    )
    for other in data.draw(st.lists(st.integers(1, longer.steps), max_size=3)):
        global_batch(longer, other)
    assert (global_batch(longer, step) == expected).all()


@given(st.integers(0, 2**64), st.integers(1, 200))
def test_epochs_are_permutations_and_differ(seed, samples):
    """An epoch that repeats another one's order would be a key that lost its epoch."""
    order = SampleOrder(seed=seed, samples=samples, global_batch=1, shards=1, epochs=2, tail=Tail.DROP)
    first, second = order.permutation(0), order.permutation(1)
    assert sorted(first) == sorted(second) == list(range(samples))
    if samples >= 50:  # the chance of two equal ones is below 1e-64
        assert (first != second).any()


def test_the_order_is_what_it_always_was():
    """Frozen values: a run that began under an older version must go on in the same order."""
    order = SampleOrder(seed=7, samples=10, global_batch=4, shards=2, epochs=2, tail=Tail.DROP)
    assert [order.permutation(epoch).tolist() for epoch in range(2)] == FROZEN


@given(st.lists(st.integers(0, 2**64 - 1) | st.text(max_size=5), max_size=4), st.data())
def test_keys_tell_their_parts_apart(parts, data):
    """Another order of the parts, one part more or less, is another key: else two purposes would
    share their draws.
    """
    shuffled = data.draw(st.permutations(parts))
    assert (key(*shuffled) == key(*parts)) == (shuffled == parts)
    assert key(*parts, 0) != key(*parts)
    assert 0 <= key(*parts) < 2**64


@settings(max_examples=25)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 50), st.integers(1, 20))
def test_draws_are_a_function_of_key_sample_and_place(base, sample, first, count):
    """A sample drawn alone, or in two calls, has the numbers that it has in any batch; all lie in
    [0, 1).
    """
    together = uniform(base, np.array([3, sample, 5]), 0, first + count)
    alone = uniform(base, np.array([sample]), first, count)
    assert together.dtype == np.float32 and together.shape == (3, first + count)
    assert (together[1, first:] == alone[0]).all()
    assert (together >= 0).all() and (together < 1).all()


def test_bits_are_spread_evenly():
    """The simplest count finds a broken mixer: each of the 64 bits is set in about half of 4096
    words.
    """
    words = bits(key("evenly"), np.arange(4096, dtype=np.uint64))
    shares = [(words >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    assert max(abs(share - 0.5) for share in shares) < 0.05  # 6 standard deviations
