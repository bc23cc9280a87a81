"""What a recipe says about its samples becomes an order, or a sentence that says what is wrong."""

import random

import numpy as np
import pytest
import torch
from orders import order_of
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic.data.loader import Data, Loader, check_dataset
from elastic.errors import UsageError
from elastic.train.run import Run

SAMPLES = 20


@pytest.mark.parametrize(
    ("arguments", "says"),
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
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, says):
    with pytest.raises(UsageError) as refused:
        order_of(**arguments)
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
        choice = torch.randperm(SAMPLES)[:16].tolist()
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


def test_an_order_of_more_than_the_epoch_is_refused():
    """Hard examples chosen by the training so far, or a generator of its own: a resume would choose
    others.
    """
    own = np.random.default_rng(0)
    order = order_of(epochs=2, order=lambda _epoch: own.permutation(SAMPLES))
    with pytest.raises(
        UsageError, match=r"(?s)order\(1\): expected the same samples at each call.*elastic.Values"
    ):
        order.of_epoch(1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Unsized(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (DataLoader([1, 2, 3]), "found a DataLoader"),
        (Stream(), "found Stream"),
        (Unsized(), "found Unsized"),
        ({"images": [1], "labels": [2]}, "found dict"),
    ],
)
def test_what_has_no_samples_by_number_is_refused(dataset, says):
    """A stream, a DataLoader (whose batches would be taken for samples), and the like."""
    with pytest.raises(UsageError) as refused:
        check_dataset(dataset, "run.data")
    assert says in str(refused.value)


def test_data_say_how_many_steps_an_epoch_has():
    """Own orders may differ in it; a single number would be wrong for some epoch."""

    def data(order):
        tensors = TensorDataset(torch.zeros(SAMPLES))
        return Data(loader=Loader(dataset=tensors, order=order, device=torch.device("cpu")))

    assert data(order_of(epochs=3)).steps_per_epoch == 2
    assert data(order_of(epochs=3, order=lambda _e: range(8))).steps_per_epoch == 1
    assert data(order_of(steps=5)).steps == 5
    with pytest.raises(UsageError, match=r"found 1 to 2; use step\.ends_epoch"):
        _ = data(order_of(epochs=2, order=lambda e: range(8 * (e + 1)))).steps_per_epoch


@pytest.mark.parametrize(
    ("data", "state", "says"),
    [(DataLoader([1, 2]), None, "found DataLoader and"), (None, {"model": 1}, "found Data and dict")],
)
def test_run_steps_names_what_it_was_given_instead(data, state, says):
    """Before anything else is looked at, so that no run is begun with it."""
    order = order_of(epochs=1)
    if data is None:
        data = Data(loader=Loader(dataset=range(SAMPLES), order=order, device=torch.device("cpu")))
    run = object.__new__(Run)
    run._loop_end = None
    with pytest.raises(UsageError) as refused:
        next(Run.steps(run, data, state))
    assert says in str(refused.value)
