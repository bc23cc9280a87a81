"""A state is trained further on the data that it was trained on, or not at all."""

from dataclasses import replace
from functools import partial

import orders
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.record import check_ranks, check_resume, has_same_steps, parse, record_of
from elastic.errors import UsageError

SAMPLES = 24
order_of = partial(orders.order_of, samples=SAMPLES)
SPLIT = {"dataset.indices": "aa", "dataset.dataset.tensors[0]": "bb"}


def beside(order, step):
    return parse(record_of(order, order.position(step)[0]).to_json())


def resumes(there, order, step, contents=None):
    return check_resume(there, record_of(order, 0, contents), order, step, "NEW_RUN")


def growing(epoch):
    return range(8 * (1 + epoch % 3))


CHOICES = [
    {"epochs": 4},
    {"steps": 10},
    {"epochs": 4, "tail": "pad"},
    {"epochs": 4, "weights": range(SAMPLES)},
    {"epochs": 4, "order": growing},
    {"steps": 7, "order": growing},
]


@given(st.sampled_from(CHOICES), st.sampled_from(CHOICES), st.integers(1, 7))
def test_other_choices_than_before_are_refused_or_said(before, now, step):
    """Any pair of choices but for their lengths: they are other data, or another length is said."""
    there, here = order_of(**before), order_of(**now)
    drawn = [{name: choice.get(name) for name in ("tail", "weights", "order")} for choice in (before, now)]
    if drawn[0] != drawn[1]:
        with pytest.raises(UsageError):
            resumes(beside(there, step), here, step)
    else:
        said = resumes(beside(there, step), here, step)
        assert (said == "") == ((there.steps, there.epochs) == (here.steps, here.epochs))
    is_same = drawn[0] == drawn[1] and (there.steps, there.epochs) == (here.steps, here.epochs)
    assert has_same_steps(record_of(there, 0), record_of(here, 0)) == is_same


def test_a_state_trained_on_nothing_goes_on_with_any_data():
    """Step 0 of a run that began from another one's state, and was corrected before it trained."""
    assert resumes(record_of(order_of(epochs=2), 0), order_of(samples=9, steps=1), 0) == ""


def test_an_order_is_compared_as_far_as_it_was_trained():
    """With another length: epochs that the state has seen must be the same, later ones need not be
    there yet. With the same length all epochs must be the same.
    """

    def changed(epoch):
        return growing(epoch) if epoch < 2 else range(16)

    before = order_of(epochs=4, order=growing)  # ends after steps 1, 3, 6 and 7
    longer, other = order_of(epochs=6, order=changed), order_of(epochs=4, order=changed)
    assert "it has step 3" in resumes(beside(before, 3), longer, 3)
    for step, order in ((4, longer), (3, other)):
        with pytest.raises(UsageError, match=r"order \("):
            resumes(beside(before, step), order, step)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 23),
        ("steps", 9),
        ("order", "cd"),
        ("contents", SPLIT | {"dataset.indices": "cc"}),
    ],
)
def test_ranks_with_other_data_are_told_which(field, value):
    """A rank that took its own part of the data, or drew weights or an order of its own."""
    same = record_of(order_of(epochs=4), 0, SPLIT)
    check_ranks([same, same])
    with pytest.raises(UsageError, match=rf"ranks 0 and 2 other {field}.*a generator of its own"):
        check_ranks([same, same, replace(same, **{field: value})])


@pytest.mark.parametrize(
    ("samples", "contents", "says"),
    [
        (SAMPLES, SPLIT | {"dataset.indices": "cc"}, r"contents of dataset\.indices;"),
        (
            SAMPLES,
            {"dataset.tensors[0]": "bb"},
            r"contents of dataset\.indices, dataset\.dataset\.tensors\[0\]",
        ),
        (32, SPLIT, r"step 5 was .*samples \(24 and 32\);.*NEW_RUN"),
    ],
)
def test_other_samples_are_refused_with_what_differs(samples, contents, says):
    """A split that the global generator drew, the whole data set in place of a split, another."""
    there = record_of(order_of(epochs=4), 1, SPLIT)
    assert resumes(there, order_of(epochs=4), 5, SPLIT) == ""
    with pytest.raises(UsageError, match=says):
        resumes(there, order_of(samples=samples, epochs=4), 5, contents)
