"""What a recipe's loop keeps in its state by name."""

import copy
import math
import re
from collections import Counter, deque
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic
from elastic.errors import UsageError
from elastic.train.state.state import State


class Level(IntEnum):
    HIGH = 1


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def test_a_number_in_a_tensor_becomes_the_number():
    """A loss is a tensor often, without dimensions; it must not drag its graph along."""
    values = elastic.Values(best=math.inf)
    values.best = torch.tensor(2.5, requires_grad=True)
    assert (values.best, type(values.best)) == (2.5, float)
    values.best = min(values.best, torch.tensor(3))
    assert values.best == 2.5


NUMBERS = st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_, np.complex64])
SIZES = st.sampled_from([0, 1, 2, 3, (1, 1), (0, 2), (2, 2)])
ARRAYS = st.builds(lambda kind, size: np.ones(size).astype(kind), NUMBERS, SIZES)
SCALARS = st.builds(lambda kind, number: kind(number), NUMBERS, st.integers(0, 9))
CONTENTS = PLAIN | SCALARS | ARRAYS | ARRAYS.map(torch.from_numpy)
NESTED = st.recursive(
    CONTENTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
)


def alike(one, other):
    if isinstance(one, (torch.Tensor, np.ndarray)):
        are_alike = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return are_alike and bool((one == other).all())
    if isinstance(one, dict):
        return type(other) is dict and alike(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return (one, type(one)) == (other, type(other))


@given(before=NESTED, after=NESTED)
def test_tensors_arrays_lists_and_dicts_come_back_as_they_were(before, after):
    """With types and the order of dicts, in the place of any other value."""
    values = elastic.Values(held=before)
    values.held = after
    fresh = elastic.Values(held=before)
    State(values=fresh).load(State(values=values).flatten())
    assert alike(fresh.held, after)


def test_a_name_for_a_part_of_a_value_survives_a_load():
    """A list in a dict, an array and a tensor that the recipe looked up before its loop."""
    saved = elastic.Values(of={"train": [1.0, 2.0]}, errors=np.arange(3.0), center=torch.arange(3.0))
    values = elastic.Values(of={"train": []}, errors=np.zeros(3), center=torch.zeros(3))
    recent, errors, center = values.of["train"], values.errors, values.center
    State(values=values).load(State(values=saved).flatten())
    recent.append(0.0)
    assert values.of == {"train": [1.0, 2.0, 0.0]}
    assert errors.tolist() == center.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Level.HIGH, "found Level; keep x.value"),
        ({1, 2}, "found set; keep sorted(x)"),
        (Path("a"), "found PosixPath; keep str(x)"),
        (deque([1]), "found deque; keep list(x)"),
        (Counter("a"), "found Counter; keep dict(x)"),
        (torch.Size([2]), "found Size; keep tuple(x)"),
        (object(), "an object of its own with state_dict"),
        ({None: 1}, "keep a list of pairs"),
        ({"ndarray": 1}, "keep a list of pairs"),
        (np.array(["a", None]), "ndarray of object"),
        (np.uint64(3), "uint64 of uint64"),
        (torch.ones(2).to(torch.uint32), "Tensor of torch.uint32"),
    ],
)
def test_a_value_that_no_state_can_keep_is_refused(value, words):
    """Where it is set, alone and inside a list; put into a list or dict, where the state is taken.
    An IntEnum is no int, lest it come back as one.
    """
    values = elastic.Values(best=0, recent=[0] * 500, of={"train": []})
    for each in (value, [value]):
        with pytest.raises(UsageError, match=rf"at best.*{re.escape(words)}"):
            values.best = each
    values.recent.append(value)
    with pytest.raises(UsageError, match=rf"at recent\[500\].*{re.escape(words)}"):
        values.state_dict()
    values.recent.pop()
    values.of["train"].append({"a": (value,)})
    with pytest.raises(UsageError, match=rf"at of\['train'\]\[0\]\['a'\]\[0\].*{re.escape(words)}"):
        values.state_dict()


def test_a_tensor_of_a_graph_in_a_list_is_refused():
    values = elastic.Values(recent=[])
    values.recent.append(torch.zeros(2, requires_grad=True) * 2)
    with pytest.raises(UsageError, match="part of a graph"):
        values.state_dict()


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


def test_weights_come_back_as_load_state_dict_wants_them():
    """What is advised for an OrderedDict: BatchNorm's count of batches became a number, and the
    load of the best weights at the end of the run a raw error.
    """
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(UsageError, match=re.escape("OrderedDict; keep dict(x)")):
        elastic.Values(best=model.state_dict())
    values = elastic.Values(best=dict(model.state_dict()), history=[torch.tensor(3), torch.tensor(0.5)])
    assert values.history == [3, 0.5]
    model(torch.randn(4, 2))
    values.best = dict(model.state_dict())
    fresh = elastic.Values(best={}, history=[])
    State(values=fresh).load(State(values=values).flatten())
    expected = copy.deepcopy(model.state_dict())
    torch.nn.init.zeros_(model[0].weight)
    model.load_state_dict(fresh.best)
    for found, before in zip(model.state_dict().values(), expected.values(), strict=True):
        assert found.dtype == before.dtype and torch.equal(found, before)


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_or_dict_at_two_places_is_refused(kind):
    """It came back as two, so that what was appended to the newest epoch's list after a kill was
    missing in the history: another result, and nothing said so.
    """
    values = elastic.Values(current=kind(), epochs=[])
    values.epochs.append(values.current)
    with pytest.raises(UsageError, match=r"epochs\[0\], found the one at current.*put a copy there"):
        values.state_dict()
    values.epochs[0] = kind(values.current)
    assert values.state_dict() == {"current": kind(), "epochs": [kind()]}
