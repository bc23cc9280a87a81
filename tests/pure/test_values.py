"""Plain numbers that a recipe keeps in its state."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic
from elastic.errors import StateDoesNotFit, UsageError
from elastic.train.state import State

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(before=PLAIN, after=PLAIN)
def test_a_value_comes_back_with_its_type(before, after):
    """Saved after it was set to another value, of another type perhaps, and loaded into fresh
    ones.
    """
    values = elastic.Values(best=before, patience=0)
    values.best = after
    fresh = elastic.Values(best=before, patience=7)
    State(values=fresh).load(State(values=values).flatten())
    assert (fresh.best, type(fresh.best), fresh.patience) == (after, type(after), 0)


def test_a_number_in_a_tensor_becomes_the_number():
    """A loss is a tensor often, of one element in any shape; it must not drag its graph along."""
    values = elastic.Values(best=math.inf)
    for number in (torch.tensor([[2.5]], requires_grad=True), np.float64(2.5), np.array([2.5])):
        values.best = number
        assert (values.best, type(values.best)) == (2.5, float)
    values.best = min(values.best, torch.tensor(3))
    assert values.best == 2.5


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(2), [1], {"a": 1}, 1j, torch.zeros(0)])
def test_a_value_that_is_no_plain_number_is_refused(value):
    """Set, and given at the start."""
    values = elastic.Values(best=0)
    with pytest.raises(UsageError, match="'best', found"):
        values.best = value
    with pytest.raises(UsageError, match="object of their own with state_dict"):
        elastic.Values(best=value)


def test_a_slip_of_the_pen_makes_no_new_value():
    """Set, read and deleted under a name that was not given; also a name of the class's own."""
    values = elastic.Values(best=0)
    with pytest.raises(AttributeError, match=r"expected one of the values \['best'\], found 'bset'"):
        values.bset = 1
    with pytest.raises(UsageError, match=r"Values\(bset=\.\.\.\)"):
        values.bset  # noqa: B018
    assert not hasattr(values, "bset")
    with pytest.raises(UsageError, match="to stay"):
        del values.best
    for taken in ("state_dict", "_best"):
        with pytest.raises(UsageError, match="another name"):
            elastic.Values(**{taken: 0})


def test_values_under_other_names_are_not_loaded():
    """A recipe that got a value more since the run began."""
    saved = State(values=elastic.Values(best=1)).flatten()
    with pytest.raises(
        StateDoesNotFit, match=r"expected the values \['best', 'patience'\], found \['best'\]"
    ):
        State(values=elastic.Values(best=1, patience=0)).load(saved)


def test_a_copy_of_values_is_its_own():
    """`copy.deepcopy` asks objects for methods that Values do not have."""
    values = elastic.Values(best=1)
    kept = copy.deepcopy(values)
    values.best = 2
    assert (kept.best, repr(values)) == (1, "Values(best=2)")
