"""What a recipe's loop keeps in its state by name."""

import copy
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic
from elastic.errors import StateDoesNotFit, UsageError
from elastic.train.state.state import State
from elastic.train.state.values import check_all


class Level(IntEnum):
    HIGH = 1


@dataclass
class Limits:
    low: float


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


def test_a_name_for_a_part_of_a_value_is_still_that_part_after_a_load():
    """A list, an array and a tensor that the recipe looked up before its loop."""
    saved = elastic.Values(recent=[1.0, 2.0], errors=np.arange(3.0), center=torch.arange(3.0))
    values = elastic.Values(recent=[], errors=np.zeros(3), center=torch.zeros(3))
    recent, errors, center = values.recent, values.errors, values.center
    State(values=values).load(State(values=saved).flatten())
    assert (recent, errors.tolist(), center.tolist()) == ([1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0])


def test_a_value_is_a_copy_without_a_graph():
    """A tensor of the model's own would no longer be the model's after a load."""
    weight = torch.ones(3, requires_grad=True)
    values = elastic.Values(weight=weight, double=weight * 2)
    with torch.no_grad():
        weight.zero_()
    assert values.weight.tolist() == [1, 1, 1]
    assert not values.double.requires_grad


@pytest.mark.parametrize(
    "value", [{1}, [object()], {"a": b"b"}, 1j, np.array(["a", "b"]), {"ndarray": 1}, {(): 1}]
)
def test_a_value_that_a_state_cannot_keep_is_refused(value):
    """Set, and given at the start."""
    values = elastic.Values(best=0)
    with pytest.raises(UsageError, match="'best', found"):
        values.best = value
    with pytest.raises(UsageError, match="object of its own with state_dict"):
        elastic.Values(best=value)


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (Level.HIGH, "Level: keep x.value"),
        ({1, 2}, "set: keep sorted(x)"),
        (Path("a"), "PosixPath: keep str(x)"),
        (datetime(2026, 1, 1, tzinfo=UTC), "datetime: keep x.isoformat()"),
        (timedelta(1), "timedelta: keep x.total_seconds()"),
        (1j, "complex: keep (x.real, x.imag)"),
        (deque([1]), "deque: keep list(x)"),
        (Counter("a"), "Counter: keep dict(x)"),
        (torch.Size([2]), "Size: keep tuple(x)"),
        ({None: 1}, "a dict with a key of type NoneType: keep a list of pairs"),
        (np.array(["a", None]), "an array of object"),
    ],
)
def test_a_refused_value_is_told_what_to_keep_in_its_place(value, instead):
    """Alone and inside a list; an IntEnum is no int, lest it come back as one."""
    for each in (value, [value]):
        with pytest.raises(UsageError, match=rf"for 'best', found {re.escape(instead)}"):
            elastic.Values(best=each)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Counter("a"), "Counter: keep dict(x)"),
        (OrderedDict(a=1), "OrderedDict: keep dict(x)"),
        (defaultdict(int), "defaultdict: keep dict(x)"),
        (deque([1]), "deque: keep list(x)"),
        ({1}, "set: keep sorted(x)"),
        (torch.zeros(2, requires_grad=True) * 2, "a tensor that is part of a graph: keep x.detach()"),
        ({"ndarray": 1}, "a dict with the key 'ndarray', which is taken"),
        ({(1, 2): 1}, "a dict with a key of type tuple: keep a list of pairs"),
        (Limits(1.0), "Limits"),
    ],
)
@pytest.mark.parametrize("step", [0, 21])
def test_what_a_list_was_given_is_refused_at_the_end_of_its_step(value, found, step):
    """By append, by an item's name and deep inside: no assignment to an attribute sees it."""
    values = elastic.Values(best=0, recent=[0] * 500, of={"train": []})
    objects = [torch.nn.Linear(1, 1), values]
    check_all(objects, step)
    values.recent += [1, np.float64(2), np.zeros(2), torch.tensor(3.0), (4, "five"), {"six": [7]}]
    check_all(objects, step)
    for put, place in (
        (lambda: values.recent.append(value), "recent[506]"),
        (lambda: values.of.__setitem__("test", [value]), "of['test'][0]"),
        (lambda: values.of["train"].append({"a": (value,)}), "of['train'][0]['a'][0]"),
    ):
        put()
        with pytest.raises(UsageError) as raised:
            check_all(objects, step)
        assert f"at {place}, found {found}" in str(raised.value)
        with pytest.raises(UsageError):
            values.state_dict()
        values.recent.clear(), values.of.clear()
        values.recent += [0] * 506
        values.of["train"] = []


def test_a_name_for_a_list_in_a_value_is_still_that_list_after_a_load():
    """`train = values.of["train"]` before the loop: what it appends would be lost at a restart."""
    saved = elastic.Values(of={"train": [1.0, 2.0], "test": [3.0]}, rows=[[4], [5]])
    values = elastic.Values(of={"train": []}, rows=[[]])
    train, row = values.of["train"], values.rows[0]
    State(values=values).load(State(values=saved).flatten())
    assert (train, row) == ([1.0, 2.0], [4])
    train.append(0.0), row.append(0)
    assert (values.of, values.rows) == ({"train": [1.0, 2.0, 0.0], "test": [3.0]}, [[4, 0], [5]])


def test_all_values_that_cannot_be_kept_are_refused_at_once():
    with pytest.raises(
        UsageError, match=r"for 'seen', found set: .*; for 'where', found PosixPath"
    ) as raised:
        elastic.Values(best=0, seen={1}, where=Path("a"))
    assert "best" not in str(raised.value)


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


def test_a_value_that_contains_itself_is_refused():
    """Python's own answer is a RecursionError, which names nothing."""
    ring = []
    ring.append(ring)
    with pytest.raises(UsageError, match=r"'ring', found more than 50 lists.*does one contain itself"):
        elastic.Values(ring=ring)


def test_the_weights_of_a_model_come_back_as_its_load_state_dict_wants_them():
    """What is advised for an OrderedDict: BatchNorm's count of batches became a number, and the
    load of the best weights at the end of the run a raw error.
    """
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(UsageError, match=re.escape("keep dict(x)")):
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
def test_a_list_or_dict_at_two_places_is_refused_where_the_state_is_taken(kind):
    """It came back as two, so that what was appended to the newest epoch's list after a kill was
    missing in the history: another result, and nothing said so.
    """
    values = elastic.Values(current=kind(), epochs=[])
    values.epochs.append(values.current)
    with pytest.raises(UsageError, match=r"epochs\[0\], found the one at current.*put a copy there"):
        values.state_dict()
    values.epochs[0] = kind(values.current)
    assert values.state_dict() == {"current": kind(), "epochs": [kind()]}


def test_a_list_that_is_put_into_itself_is_refused():
    values = elastic.Values(ring=[])
    values.ring.append(values.ring)
    with pytest.raises(UsageError, match=r"ring\[0\], found the one at ring"):
        values.state_dict()


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (np.uint64(3), r"uint64: keep int\(x\)"),
        (np.ones(2, np.uint16), r"an array of uint16: keep x\.astype\(np\.int64\)"),
        (torch.ones(2).to(torch.uint32), r"a tensor of torch\.uint32: keep x\.to\("),
    ],
)
def test_a_number_of_a_type_that_no_state_can_keep_is_refused_where_it_is_set(value, instead):
    """It was refused where the state was saved, by the name of a file's entry."""
    values = elastic.Values(seen=0, items=[])
    with pytest.raises(UsageError, match=f"'seen', found {instead}"):
        values.seen = value
    values.items.append(value)
    with pytest.raises(UsageError, match=instead):
        values.state_dict()


@pytest.mark.parametrize("names", [{"seen", "k"}, set()])
def test_a_name_that_comes_or_goes_past_the_values_is_refused_in_that_step(names):
    """A load refused the state that had it, after the fault."""
    values = elastic.Values(seen=0)
    vars(values).clear()
    vars(values).update(dict.fromkeys(names, 0))
    with pytest.raises(UsageError, match=r"found that '(k|seen)' came or went in vars\(values\)"):
        check_all([values], 5)
