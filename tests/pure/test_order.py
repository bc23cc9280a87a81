"""Every sample is trained exactly once per epoch, at every world size and after every resume."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import frexp

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic.data import weighted
from elastic.data.order import SampleOrder, Tail
from elastic.data.random_keys import bits, key, uniform
from elastic.data.sampling import Sampling
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


SEED, SAMPLES, BATCH = 5, 17, 6
FROZEN_DRAWS = [
    [12, 0, 0, 4, 16, 14, 9, 10, 10, 1, 10, 3, 5, 1, 8, 16, 2],
    [0, 2, 8, 4, 9, 4, 4, 3, 16, 14, 16, 4, 6, 2, 1, 5, 7],
]


def chosen(**arguments):
    sampling = Sampling(
        **{"epochs": None, "steps": None, "tail": "drop", "weights": None, "order": None} | arguments
    )
    return sampling.order_of(samples=SAMPLES, seed=SEED, global_batch=BATCH, shards=3)


@given(orders(), st.integers(1, 40))
def test_a_run_of_so_many_steps_begins_as_a_run_of_epochs_does(order, steps):
    """`steps` cuts the last epoch, and changes no step before the end."""
    assume(order.steps_per_epoch)
    of_steps = Sampling(epochs=None, steps=steps, tail=order.tail.value, weights=None, order=None).order_of(
        samples=order.samples, seed=order.seed, global_batch=order.global_batch, shards=order.shards
    )
    longer = replace(order, epochs=order.epochs + steps)
    assert of_steps.steps == steps
    assert of_steps.epochs == of_steps.position(steps)[0] + 1
    assert trained(of_steps, range(1, steps + 1), 1) == trained(longer, range(1, steps + 1), 1)


@given(st.data())
def test_an_own_order_is_trained_as_its_dumb_twin_says(data):
    """The twin cuts each list into batches and knows nothing of positions and ends.

    Epochs have different lengths; a run of steps may end in the middle of one.
    """
    tail = data.draw(st.sampled_from(["drop", "pad"]))
    shortest = BATCH if tail == "drop" else 1  # an epoch without a step is refused
    epochs = st.lists(st.integers(0, SAMPLES - 1), min_size=shortest, max_size=30)
    lists = data.draw(st.lists(epochs, min_size=1, max_size=6))
    batches = []
    for epoch, samples in enumerate(lists):
        if tail == "pad":
            samples = [*samples, *(samples * BATCH)[: -len(samples) % BATCH]]  # noqa: PLW2901
        whole = len(samples) // BATCH
        batches += [(epoch, samples[k * BATCH : (k + 1) * BATCH]) for k in range(whole)]
    steps = data.draw(st.integers(1, len(batches)))
    length = data.draw(st.sampled_from([{"epochs": len(lists)}, {"steps": steps}]))
    order = chosen(order=lambda epoch: lists[epoch], tail=tail, **length)

    assert order.steps == length.get("steps", len(batches))
    for step in range(1, order.steps + 1):
        epoch, expected = batches[step - 1]
        assert order.position(step)[0] == epoch
        assert global_batch_of_own(order, step) == expected
        is_end = step == order.steps or batches[step][0] != epoch
        assert order.ends_epoch(step) == is_end


def global_batch_of_own(order, step):
    epoch, batch_in_epoch = order.position(step)
    return order.batch(order.of_epoch(epoch), batch_in_epoch).tolist()


@given(st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=60))
def test_each_draw_of_a_sample_has_a_stream_of_its_own(samples):
    """The twin counts; the first draw has the sample's own number, as in a permutation."""
    order = chosen(order=lambda _epoch: samples, epochs=1, tail="pad")
    seen, expected = Counter(), []
    for sample in samples:
        expected.append(sample + SAMPLES * seen[sample])
        seen[sample] += 1
    assert order.streams(order.of_epoch(0)).tolist() == expected


weights_of_all = st.lists(
    st.floats(0, 1e300) | st.sampled_from([0.0, 5e-324, 1e-9, 1.0]), min_size=SAMPLES, max_size=SAMPLES
).filter(any)


@given(weights_of_all, st.integers(0, 5))
def test_weighted_draws_are_those_of_their_dumb_twin(weights, epoch):
    """The twin computes in Python's whole numbers, which have no size at which they round.

    A sample without weight is never drawn.
    """
    scale = 2 ** (weighted.TOTAL_BITS - SAMPLES.bit_length())
    largest = frexp(max(weights))[1]
    whole = [round(Fraction(weight) / Fraction(2) ** largest * scale) for weight in weights]
    order, expected = chosen(weights=weights, epochs=9), []
    for i in range(SAMPLES):
        word = int(bits(key(SEED, "weights", epoch), np.array([i], dtype=np.uint64))[0])
        place, sample = word * sum(whole) // 2**64, 0
        while place >= whole[sample]:
            place -= whole[sample]
            sample += 1
        expected.append(sample)
    assert order.of_epoch(epoch).tolist() == expected
    assert all(weights[sample] for sample in expected)


def test_weights_are_the_odds_of_their_samples():
    """Counts 17 000 draws of samples with odds 1 to 17; a scale of weights changes nothing."""
    odds = np.arange(1, SAMPLES + 1)
    order, scaled = chosen(weights=odds, epochs=1000), chosen(weights=odds * 0.125, epochs=1000)
    counts = np.zeros(SAMPLES)
    for epoch in range(1000):
        counts += np.bincount(order.of_epoch(epoch), minlength=SAMPLES)
    expected = odds / odds.sum() * 1000 * SAMPLES
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert (scaled.of_epoch(3) == order.of_epoch(3)).all()


def test_weighted_draws_are_what_they_always_were():
    """Frozen values: a run that began under an older version must go on with the same draws."""
    order = chosen(weights=[1.0] * SAMPLES, epochs=2)
    assert [order.of_epoch(epoch).tolist() for epoch in range(2)] == FROZEN_DRAWS


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
