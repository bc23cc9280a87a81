"""Every sample is trained exactly once per epoch, at every world size and after every resume."""

import random
from functools import partial
from math import isqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from orders import order_of
from torch.utils.data import ChainDataset, DataLoader, Dataset

from elastic.data.loader import Data, Loader, check_dataset
from elastic.data.order import SORTED_UP_TO, SampleOrder, Tail
from elastic.data.random_keys import MASK, Permutation, bits, key, keyed_permutation
from elastic.errors import UsageError
from elastic.reduce.tree import span
from elastic.train.run import Run

FROZEN = {
    "permutation": [[1, 9, 3, 4, 7, 8, 5, 6, 2, 0], [7, 2, 3, 1, 4, 5, 9, 0, 6, 8]],
    "weights": [
        [12, 0, 0, 4, 16, 14, 9, 10, 10, 1, 10, 3, 5, 1, 8, 16, 2],
        [0, 2, 8, 4, 9, 4, 4, 3, 16, 14, 16, 4, 6, 2, 1, 5, 7],
    ],
    "large": [746330226, 154646065, 719308709, 848370109],
}
BILLION = 10**9


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
                size = order.global_batch // order.shards
                trained += batch[shard * size : (shard + 1) * size].tolist()
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
    large = keyed_permutation(key(7, "permutation", 0), BILLION)
    assert large[np.array([0, 1, 2, BILLION - 1])].tolist() == FROZEN["large"]


def global_batch(order, step):
    """The samples of one step, computed from nothing but the step."""
    epoch, batch_in_epoch = order.position(step)
    return order.batch(order.of_epoch(epoch), batch_in_epoch)


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
        assert global_batch(order, step).tolist() == expected
        assert order.ends_epoch(step) == (step == order.steps or batches[step][0] != epoch)


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


# A keyed permutation: each number once, and any position by itself.

KEYS = st.integers(0, MASK)


def one_by_one(of, position):
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


@given(KEYS, st.one_of(st.integers(1, 3000), st.integers(1, 2**62 - 1)), st.data())
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


@pytest.mark.parametrize("samples", [SORTED_UP_TO, SORTED_UP_TO + 1])
def test_the_size_alone_decides_which_order_a_run_has(samples):
    assert isinstance(order_of(samples, steps=1).of_epoch(0), Permutation) == (samples > SORTED_UP_TO)


# What a recipe says about its samples becomes an order, or a sentence that says what is wrong.

ALL = 20


OWN = np.random.default_rng(0)


def data_of(**arguments):
    loader = Loader(dataset=range(ALL), order=order_of(**arguments), device=torch.device("cpu"))
    return Data(loader=loader)


def stepped(data, state):
    """By run.steps, which looks at both before anything else, so that no run is begun with them."""
    run = object.__new__(Run)
    run._loop_end = None
    next(Run.steps(run, data, state))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "found neither"),
        ({"epochs": 2, "steps": 9}, "found epochs=2 and steps=9"),
        ({"steps": True}, "a whole number from 1 on, found True"),
        ({"epochs": 1, "tail": "cut"}, "found 'cut'"),
        ({"steps": 5, "samples": 7}, "found 7 samples"),
        ({"epochs": 1, "weights": [1.0] * 19}, "found shape [19]"),
        ({"epochs": 1, "weights": [10**400] * 20}, "of the 20 samples, found list"),
        ({"epochs": 1, "weights": [1.0] * 19 + [-2.0]}, "found -2.0"),
        ({"epochs": 1, "weights": [0] * 20}, "found zeros alone"),
        ({"epochs": 1, "weights": [1] * 20, "order": range}, "found both"),
        ({"epochs": 1, "order": [1, 2]}, "expected order=function(epoch)"),
        ({"epochs": 1, "order": lambda _e: [[1, 2], [3]]}, "a sequence of sample numbers"),
        ({"epochs": 1, "order": lambda _e: [True] * 20}, "found bool [20]"),
        ({"epochs": 2, "order": lambda e: range(8 + 16 * e)}, "order(1): expected sample numbers"),
        ({"epochs": 3, "order": lambda e: range(20 - 7 * e)}, "order(2): expected at least one"),
        # Hard examples chosen by the training so far, or a generator of its own.
        (
            lambda: order_of(epochs=2, order=lambda _e: OWN.permutation(ALL)).of_epoch(1),
            "order(1): expected the same samples at each call",
        ),
        # Own orders may differ in the number of steps: a single one would be wrong for some epoch.
        (
            lambda: data_of(epochs=2, order=lambda e: range(8 * e + 8)).steps_per_epoch,
            "found 1 to 2; use step",
        ),
        # A DataLoader's batches would be taken for samples.
        (lambda: check_dataset(DataLoader([1, 2, 3]), "run.data"), "found a DataLoader"),
        (lambda: check_dataset(ChainDataset([]), "run.data"), "found ChainDataset"),
        (lambda: check_dataset(Dataset(), "run.data"), "found Dataset"),
        (lambda: check_dataset({"images": [1], "labels": [2]}, "run.data"), "found dict"),
        (lambda: stepped(DataLoader([1, 2]), None), "found DataLoader and"),
        (lambda: stepped(data_of(epochs=1), {"model": 1}), "found Data and dict"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(given, says):
    """given: arguments of run.data, or a call."""
    with pytest.raises(UsageError) as refused:
        given() if callable(given) else order_of(**given)
    assert says in str(refused.value)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_an_own_order_may_be_any_sequence_of_integers(kind):
    order = order_of(epochs=np.int64(1), order=lambda _epoch: kind([3, 1, 2, 7, 7, 7, 0, 19]))
    assert order.of_epoch(0).tolist() == [3, 1, 2, 7, 7, 7, 0, 19]


def drawn_now():
    return torch.rand(2).tolist(), random.random(), np.random.rand()  # noqa: NPY002


def test_an_own_order_draws_from_its_epochs_stream():
    """Whatever was drawn before the call, an epoch has the same samples; what is drawn afterwards
    is what would have been drawn without it.
    """

    def shuffled(epoch):
        choice = torch.randperm(ALL)[:16].tolist()
        random.shuffle(choice)
        return np.random.permutation(choice)  # noqa: NPY002

    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    undisturbed = drawn_now()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    order = order_of(epochs=3, order=shuffled)
    first = [order.of_epoch(epoch).tolist() for epoch in (2, 0, 1)]
    assert drawn_now() == undisturbed
    assert [order.of_epoch(epoch).tolist() for epoch in (2, 0, 1)] == first
    assert first[0] != first[1] != first[2]


def test_data_say_how_many_steps_an_epoch_has():
    assert data_of(epochs=3).steps_per_epoch == 2
    assert data_of(epochs=3, order=lambda _e: range(8)).steps_per_epoch == 1
    assert data_of(steps=5).steps == 5
