"""What is flattened is loaded exactly, and what cannot be kept is refused by name."""

import copy
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum, StrEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic.errors import CheckpointDamaged, StateNotSavable, UsageError
from elastic.snapshot import image
from elastic.train.state import FlatState, State, checksum_of


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state_dict):
        self.value = state_dict


def through_bytes(parts):
    """As a checkpoint keeps it: an image, read again."""
    layout = image.layout(parts.tensors, parts.document)
    body = bytearray(layout.size_bytes)
    image.copy_into(layout, memoryview(body))
    tensors, document = image.read(body)
    return FlatState(tensors=tensors, document=document)


def round_trip(value):
    kept = through_bytes(State(thing=Holder(value)).flatten())
    empty = Holder(None)
    State(thing=empty).load(kept)
    return empty.value


def is_same(one, other):
    """Types, bits, order of lists; not the order of dicts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(image.tensor_bytes(one), image.tensor_bytes(other))
    if isinstance(one, OrderedDict) and list(one) != list(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (
            math.isnan(one) and math.isnan(other)
        )
    return one == other


@st.composite
def tensors(draw):
    """Any dtype that an image keeps, 0 to 3 dimensions, sometimes empty, sometimes not contiguous,
    any bits.
    """
    dtype = draw(st.sampled_from(list(image.DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if size
        else torch.empty(shape, dtype=dtype)
    )
    return tensor.T if tensor.dim() == 2 and draw(st.booleans()) else tensor


names = st.text("abcδ ", max_size=3) | st.integers()
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.floats().map(np.float64)
    | st.text(max_size=5)
    | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
        | st.dictionaries(names, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(names, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)
states = st.dictionaries(names, values, max_size=4)


@given(states)
def test_any_nested_state_comes_back_as_it_was(value):
    """Ints as keys, tuples, infinities, NaNs, -0.0, bfloat16, empty and 0-dimensional tensors,
    through real bytes.
    """
    assert is_same(round_trip(value), value)


@given(states)
def test_flattening_changes_nothing_and_draws_nothing(value):
    """A draw at a save would make the trajectory depend on how often it is saved."""
    before = copy.deepcopy(value)
    drawn = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    checksum_of(State(thing=Holder(value)).flatten())
    after = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    assert torch.equal(drawn[0], after[0]) and drawn[1:] == after[1:]
    assert is_same(value, before)


def whole_checksum_of(**objects):
    return checksum_of(State(**objects).flatten()).whole


@given(states, st.randoms(use_true_random=False))
def test_checksum_does_not_depend_on_the_order_of_insertion(value, shuffler):
    """Dicts are filled in the order in which things happened, which a resume changes."""

    def shuffled(thing):
        if type(thing) in (dict, Counter):
            items = list(thing.items())
            shuffler.shuffle(items)
            return type(thing)({name: shuffled(item) for name, item in items})
        if isinstance(thing, OrderedDict):
            return OrderedDict((name, shuffled(item)) for name, item in thing.items())
        if isinstance(thing, list | tuple):
            return type(thing)(shuffled(item) for item in thing)
        return thing

    one, other = Holder(value), Holder(shuffled(value))
    assert whole_checksum_of(a=one, b=Holder({})) == whole_checksum_of(b=Holder({}), a=other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ([1], (1,)),
        (None, "None"),
        ({"0": 1}, {0: 1}),
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}),
        (math.inf, "inf"),
        ({}, []),
        ({"a": 1}, Counter("a")),
        ({"a": 1}, OrderedDict(a=1)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (1.0, np.float64(1.0)),
    ],
)
def test_checksum_sees_the_smallest_difference(one, other):
    """Values that == calls equal, or that print alike, and still are another state."""
    assert whole_checksum_of(thing=Holder({"x": one})) != whole_checksum_of(thing=Holder({"x": other}))


def test_checksum_names_each_entry():
    """An error names the entry that differs, so the entries must cover the whole state."""
    net, other = nn.Linear(2, 2), Holder({"n": 3})
    before = checksum_of(State(net=net, other=other).flatten()).entries
    assert set(before) == {"net.weight", "net.bias", "net (values)", "other (values)"}
    nn.init.constant_(net.bias, 5.0)
    other.value = {"n": 4}
    after = checksum_of(State(net=net, other=other).flatten()).entries
    assert {name for name in before if before[name] != after[name]} == {"net.bias", "other (values)"}


def test_checksum_does_not_depend_on_strides():
    """A load makes tensors contiguous that were not when they were saved."""
    weight = torch.arange(6.0).view(2, 3)
    transposed = weight.t().contiguous().t()
    assert whole_checksum_of(thing=Holder({"w": weight})) == whole_checksum_of(
        thing=Holder({"w": transposed})
    )


class Opaque:
    pass


class Colour(IntEnum):
    RED = 1


class Word(StrEnum):
    RED = "red"


class Labelled(torch.Tensor):
    pass


Point = namedtuple("Point", "x")  # noqa: PYI024 - the plain kind, as recipes have it


@pytest.mark.parametrize(
    "value",
    [
        Opaque(),
        {1, 2},
        b"bytes",
        1j,
        np.zeros(2),
        np.int64(1),
        torch.float32,
        len,
        torch.Generator(),
        torch.eye(2).to_sparse(),
        Colour.RED,
        Word.RED,
        Point(1),
        torch.Size([1]),
        defaultdict(int),
        torch.zeros(2).as_subclass(Labelled),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_pickle_could_keep_is_refused_by_name(value):
    """The entry lies deep inside; the message must lead to it."""
    with pytest.raises(StateNotSavable, match=r"state entry thing\.a\.1\.b:"):
        State(thing=Holder({"a": [0, {"b": value}]})).flatten()


@given(states, st.data())
def test_one_opaque_value_anywhere_is_refused_by_name(value, data):
    """Put under a fresh name into some dict of the structure, however deep."""
    path, place = "thing", value
    while inner := {name: item for name, item in place.items() if type(item) is dict}:
        if data.draw(st.booleans()):
            break
        name = data.draw(st.sampled_from(list(inner)))
        path, place = f"{path}.{name}", inner[name]
    place["opaque"] = Opaque()
    with pytest.raises(StateNotSavable) as caught:
        State(thing=Holder(value)).flatten()
    assert f"state entry {path}.opaque:" in str(caught.value)
    assert "Opaque" in str(caught.value)


@pytest.mark.parametrize("key", [1.5, None, True, (1, 2), Colour.RED, Word.RED])
def test_keys_that_json_would_change_are_refused(key):
    """JSON makes strings or plain numbers of them, and they would come back as something else."""
    with pytest.raises(StateNotSavable, match=r"thing\.a: expected str or int keys"):
        State(thing=Holder({"a": {key: 1}})).flatten()


@pytest.mark.parametrize(
    "value",
    [{"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, {0: torch.zeros(1), "0": torch.ones(1)}],
    ids=["dot", "int-and-str"],
)
def test_entries_whose_paths_read_alike_are_both_kept(value):
    """A dot in a key, or 0 beside "0"; the digest sees one of the two, so that no check after
    loading would notice.
    """
    assert is_same(round_trip(value), value)


def test_checksum_does_not_depend_on_what_shares_memory():
    """Schedulers keep the optimizer's tensor lr under several names, until a load makes copies: a
    sound checkpoint would be rejected.
    """
    rate = torch.tensor(0.1)
    saved = State(thing=Holder({"now": rate, "last": rate})).flatten()
    loaded = State(thing=Holder(None))
    loaded.load(through_bytes(saved))
    assert checksum_of(loaded.flatten()).whole == checksum_of(saved).whole


def test_equal_tensors_of_their_own_are_kept_apart():
    """Same bits are no tie: a teacher starts as its student's copy, and as a view of other shape is
    another tensor.
    """
    whole = torch.arange(4.0)
    parts = State(a=Holder({"x": whole, "y": whole.clone(), "z": whole[:2]})).flatten()
    assert set(parts.tensors) == {"a.x", "a.y", "a.z"}


@pytest.mark.parametrize(
    ("names", "words"), [(["net"], r"expected the state of \['net'\]"), (["net", "optimizer", "ema"], "ema")]
)
def test_a_state_of_other_objects_is_refused(names, words):
    """An entry too few or too many: a recipe that was edited, or another run's file."""
    saved = State(net=Holder({}), optimizer=Holder({})).flatten()
    with pytest.raises(CheckpointDamaged, match=words):
        State(**{name: Holder({}) for name in names}).load(saved)


def test_a_state_that_does_not_fit_the_object_is_refused_by_name():
    """A wider layer than was saved; torch's message follows ours."""
    saved = State(net=nn.Linear(2, 3)).flatten()
    with pytest.raises(CheckpointDamaged, match=r"(?s)net does not take the saved state.*size mismatch"):
        State(net=nn.Linear(2, 4)).load(saved)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"dict": 3},
        {"set": [1]},
        {"tensor": "net.gone"},
        {"float": "x"},
        {"list": [], "dict": []},
    ],
)
def test_a_document_that_makes_no_sense_is_damage(document):
    """Never any other error: restore goes on to the next older checkpoint only after this one."""
    with pytest.raises(CheckpointDamaged):
        State(net=Holder({})).load(FlatState(tensors={}, document={"net": document}))


def test_a_state_needs_objects_that_have_one():
    """Said when the recipe starts, not at the first save."""
    with pytest.raises(UsageError, match="found none"):
        State()
    with pytest.raises(UsageError, match=r"State\(net=\.\.\.\).*found Tensor"):
        State(net=torch.zeros(1))


def test_documents_are_plain_json():
    """json.loads of any language reads it: no NaN, no Infinity."""
    parts = State(thing=Holder({"a": math.inf, "b": -math.inf, "c": math.nan})).flatten()
    json.dumps(parts.document, allow_nan=False)


class Keeper(nn.Linear):
    """A module with more state than its tensors, which it keeps as it is given."""

    def __init__(self):
        super().__init__(2, 2)
        self.kept = torch.arange(3.0)

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.mark.parametrize(
    "make",
    [lambda: nn.BatchNorm1d(3), Keeper, lambda: Holder({"x": torch.ones(3)})],
    ids=["module", "module that keeps", "object"],
)
def test_nothing_that_was_loaded_lies_in_memory_that_is_written_again(make):
    """The image is a slot of the memory for snapshots; after the load it is filled with other
    bytes.
    """
    saved = State(thing=make()).flatten()
    layout = image.layout(saved.tensors, {"state": saved.document})
    slot = bytearray(layout.size_bytes)
    image.copy_into(layout, memoryview(slot))
    tensors, document = image.read(slot, copy=False)
    loaded = State(thing=make())
    loaded.load(FlatState(tensors=tensors, document=document["state"]))
    slot[len(layout.head) :] = b"\xff" * (len(slot) - len(layout.head))
    assert checksum_of(loaded.flatten()) == checksum_of(saved)
