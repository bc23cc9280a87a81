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


def resumes(there, order, step, contents=None):
    return check_resume(parse(there.to_json()), record_of(order, contents), step, "NEW_RUN")


def growing(epoch):
    return range(8 * (1 + epoch % 3))


CHOICES = [
    {"epochs": 4},
    {"steps": 10},
    {"epochs": 4, "tail": "pad"},
    {"epochs": 4, "weights": range(SAMPLES)},
    {"epochs": 4, "order": growing},
    {"steps": 5, "order": growing},
]


@given(st.sampled_from(CHOICES), st.sampled_from(CHOICES), st.integers(1, 7))
def test_other_choices_than_before_are_refused_or_said(before, now, step):
    """Any pair of choices: they are other data, or another length is said. What an own order chose
    is compared as a whole.
    """
    there, here = order_of(**before), order_of(**now)
    drawn = [{name: choice.get(name) for name in ("tail", "weights", "order")} for choice in (before, now)]
    is_as_long = (there.steps, there.epochs) == (here.steps, here.epochs)
    if drawn[0] != drawn[1] or ("order" in before and not is_as_long):
        with pytest.raises(UsageError):
            resumes(record_of(there), here, step)
    else:
        assert (resumes(record_of(there), here, step) == "") == is_as_long
    assert has_same_steps(record_of(there), record_of(here)) == (drawn[0] == drawn[1] and is_as_long)


def test_a_state_trained_on_nothing_goes_on_with_any_data():
    """Step 0 of a run that began from another one's state, and was corrected before it trained."""
    assert resumes(record_of(order_of(epochs=2)), order_of(samples=9, steps=1), 0) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [("samples", 23), ("steps", 9), ("order", "cd"), ("contents", SPLIT | {"dataset.indices": "cc"})],
)
def test_ranks_with_other_data_are_told_which(field, value):
    """A rank that took its own part of the data, or drew weights or an order of its own."""
    same = record_of(order_of(epochs=4), SPLIT)
    check_ranks([same, same])
    with pytest.raises(UsageError, match=rf"ranks 0 and 2 other {field}.*a generator of its own"):
        check_ranks([same, same, replace(same, **{field: value})])


@pytest.mark.parametrize(
    ("samples", "contents", "says"),
    [
        (SAMPLES, SPLIT | {"dataset.indices": "cc"}, r"contents of dataset\.indices;"),
        (SAMPLES, {"dataset.tensors[0]": "bb"}, r"of dataset\.indices, dataset\.dataset\.tensors\[0\]"),
        (32, SPLIT, r"step 5 was .*samples \(24 and 32\);.*NEW_RUN"),
    ],
)
def test_other_samples_are_refused_with_what_differs(samples, contents, says):
    """A split that the global generator drew, the whole data set in place of a split, another."""
    there = record_of(order_of(epochs=4), SPLIT)
    assert resumes(there, order_of(epochs=4), 5, SPLIT) == ""
    with pytest.raises(UsageError, match=says):
        resumes(there, order_of(samples=samples, epochs=4), 5, contents)
