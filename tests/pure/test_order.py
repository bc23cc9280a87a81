"""Every sample is trained exactly once per epoch, at every world size and after every resume."""

from collections import Counter
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from orders import order_of

from elastic.data.order import SampleOrder, Tail
from elastic.data.random_keys import bits, key
from elastic.reduce.tree import span

FROZEN = {
    "permutation": [[1, 9, 3, 4, 7, 8, 5, 6, 2, 0], [7, 2, 3, 1, 4, 5, 9, 0, 6, 8]],
    "weights": [
        [12, 0, 0, 4, 16, 14, 9, 10, 10, 1, 10, 3, 5, 1, 8, 16, 2],
        [0, 2, 8, 4, 9, 4, 4, 3, 16, 14, 16, 4, 6, 2, 1, 5, 7],
    ],
}


@st.composite
def orders(draw):
    """Of epochs, or of a number of steps that may end within one."""
    shards, tail = draw(st.integers(1, 9)), draw(st.sampled_from(["drop", "pad"]))
    global_batch = shards * draw(st.integers(1, 4))
    samples = draw(st.integers(global_batch if tail == "drop" else 1, 60))
    length = draw(st.builds(dict, epochs=st.integers(1, 3)) | st.builds(dict, steps=st.integers(1, 40)))
    seed = draw(st.integers(0, 2**64))
    return order_of(samples, seed=seed, global_batch=global_batch, shards=shards, tail=tail, **length)


def twin(order, epoch):
    """The samples that an epoch trains, from its permutation, with no word of steps and shards."""
    samples = order.permutation(epoch).tolist()
    rest = len(samples) % order.global_batch
    if rest and order.tail is Tail.DROP:
        return samples[:-rest]
    return samples + (samples * order.global_batch)[: -len(samples) % order.global_batch]


@given(orders(), st.data())
def test_ranks_together_train_each_epoch_at_any_world_size(order, data):
    """Also where the number of ranks changes at any step. Each epoch is a permutation."""
    stop = data.draw(st.integers(0, order.steps))
    before, after = (data.draw(st.integers(1, order.shards)) for _ in range(2))
    trained = []
    for step in range(1, order.steps + 1):
        batch, world_size = global_batch(order, step), before if step <= stop else after
        for rank in range(world_size):
            for shard in span(order.shards, world_size, rank):
                trained += order.shard(batch, shard).tolist()
    epochs = range(order.epochs)
    assert trained == [each for epoch in epochs for each in twin(order, epoch)][: len(trained)]
    assert len(trained) == order.steps * order.global_batch
    assert order.ends_epoch(order.steps) and order.position(order.steps)[0] == epochs[-1]
    assert all(sorted(order.permutation(epoch)) == list(range(order.samples)) for epoch in epochs)


def test_orders_are_what_they_always_were():
    """Frozen values: a run goes on in the order in which it began, under any later version."""
    order = SampleOrder(seed=7, samples=10, global_batch=4, shards=2, epochs=2, tail=Tail.DROP)
    assert [order.permutation(epoch).tolist() for epoch in range(2)] == FROZEN["permutation"]
    weighted = chosen(weights=[1.0] * SAMPLES, epochs=2)
    assert [weighted.of_epoch(epoch).tolist() for epoch in range(2)] == FROZEN["weights"]


def global_batch(order, step):
    """The samples of one step, computed from nothing but the step."""
    epoch, batch_in_epoch = order.position(step)
    return order.batch(order.permutation(epoch), batch_in_epoch)


SEED, SAMPLES, BATCH = 5, 17, 6


chosen = partial(order_of, SAMPLES, seed=SEED, global_batch=BATCH, shards=3)


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
    """The twin looks at one sample after the other. A sample without weight is never drawn."""
    order, sums, expected = chosen(weights=weights, epochs=9), [], []
    for weight in weights:
        sums.append((sums[-1] if sums else 0.0) + weight / max(weights))
    for i in range(SAMPLES):
        word = int(bits(key(SEED, "weights", epoch), np.array([i], dtype=np.uint64))[0])
        place = (word >> 11) / 2**53 * sums[-1]
        expected.append(next(sample for sample in range(SAMPLES) if sums[sample] > place))
    assert order.of_epoch(epoch).tolist() == expected
    assert all(weights[sample] for sample in expected)


@given(st.lists(st.integers(0, 2**64 - 1) | st.text(max_size=5), max_size=4), st.data())
def test_keys_tell_their_parts_apart(parts, data):
    """Another order of the parts, one part more or less, is another key: else two purposes would
    share their draws.
    """
    shuffled = data.draw(st.permutations(parts))
    assert (key(*shuffled) == key(*parts)) == (shuffled == parts)
    assert key(*parts, 0) != key(*parts)
    assert 0 <= key(*parts) < 2**64
