"""What is flattened is loaded exactly, and what cannot be kept is refused by name."""

import copy
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_state import saved
from torch import nn

from elastic.errors import CheckpointDamaged, StateDoesNotFit, StateNotSavable, UsageError
from elastic.snapshot import image
from elastic.train.state.flat import FlatState, checksum_of
from elastic.train.state.state import State


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state_dict):
        self.value = state_dict


def round_trip(value):
    kept = saved(State(thing=Holder(value)))
    empty = Holder(None)
    State(thing=empty).load(kept)
    return empty.value


def is_same(one, other):
    """Types, bits, strides; the order of lists and dicts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        alike = alike and (one.numel() == 0 or one.stride() == other.stride())
        return alike and torch.equal(image.tensor_bytes(one), image.tensor_bytes(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (
            math.isnan(one) and math.isnan(other)
        )
    return one == other


@st.composite
def tensors(draw):
    """Any dtype that an image keeps, 0 to 3 dimensions, sometimes empty, in any order in memory,
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
    return tensor.permute(draw(st.permutations(range(tensor.dim())))).clone()


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
    """Ints as keys in any order, tuples, infinities, NaNs, -0.0, bfloat16, empty, transposed and
    0-dimensional tensors, through real bytes. Nothing is changed and nothing drawn: a draw at a
    save would make the trajectory depend on how often it is saved.
    """

    def drawn():
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002

    before, places = copy.deepcopy(value), drawn()
    assert is_same(round_trip(value), before)
    checksum_of(State(thing=Holder(value)).flatten())
    assert is_same(value, before) and drawn() == places


def whole_checksum_of(**objects):
    return checksum_of(State(**objects).flatten()).whole


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ([1], (1,)),
        ({"0": 1}, {0: 1}),
        ({"a": 1}, Counter("a")),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(2), nn.Parameter(torch.zeros(2))),
        (nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)),
        (1.0, np.float64(1.0)),
    ],
)
def test_checksum_sees_the_smallest_difference(one, other):
    """Values that == calls equal, or that print alike, and still are another state."""
    assert whole_checksum_of(thing=Holder({"x": one})) != whole_checksum_of(thing=Holder({"x": other}))


class Opaque:
    pass


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x")  # noqa: PYI024 - the plain kind, as recipes have it


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Opaque(), "the tensors, numbers and strings in it"),
        ({1, 2}, r"sorted\(x\)"),
        (np.zeros(2), r"torch\.from_numpy\(x\)"),
        (Colour.RED, "x.value"),
        (Point(1), r"tuple\(x\)"),
        (defaultdict(int), r"dict\(x\)"),
        (torch.Generator(), r"x\.get_state\(\)"),
        (torch.eye(2).to_sparse(), "convert it"),
        (torch.zeros(2, device="meta"), "without values"),
        (torch.zeros(2, requires_grad=True) * 2, "part of a graph"),
        ({(1, 2): 1}, "expected str or int keys"),
    ],
)
def test_what_only_pickle_could_keep_is_refused_by_name(value, words):
    """The entry lies deep inside; the message leads to it, and says what to give."""
    with pytest.raises(StateNotSavable, match=rf"state entry thing\.a\.1\.b: .*{words}"):
        State(thing=Holder({"a": [0, {"b": value}]})).flatten()


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


@pytest.mark.parametrize("names", [["net"], ["net", "optimizer", "ema"]])
def test_a_state_of_other_objects_is_refused(names):
    """An entry too few or too many: a recipe that was edited, or another run's file."""
    saved = State(net=Holder({}), optimizer=Holder({})).flatten()
    with pytest.raises(StateDoesNotFit, match=r"it has the entries net, optimizer, and .* State has"):
        State(**{name: Holder({}) for name in names}).load(saved)


@pytest.mark.parametrize(
    "document",
    [
        {"dict": 3},
        {"set": [1]},
        {"tensor": "net.gone"},
        {"list": [], "dict": []},
    ],
)
def test_a_document_that_makes_no_sense_is_damage(document):
    """Never any other error: restore goes on to the next older checkpoint only after this one."""
    with pytest.raises(CheckpointDamaged):
        State(net=Holder({})).load(FlatState(tensors={}, document={"net": document}))


@pytest.mark.parametrize(
    "thing",
    [Opaque(), Opaque, {"net": nn.Linear(1, 1)}, torch.ones(1), torch.jit.script(nn.Linear(2, 2))],
)
def test_an_object_without_a_state_dict_is_refused_at_once(thing):
    """Said when the recipe starts, not at the first save."""
    with pytest.raises(UsageError, match=r"State\(net=\.\.\.\): expected an object .*elastic\.Values\(net="):
        State(net=thing)
    with pytest.raises(UsageError, match="found none"):
        State()


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
def test_a_loaded_state_shares_no_memory_with_the_image(make):
    """The image is a slot of the memory for snapshots; after the load it is filled with other
    bytes.
    """
    saved = State(thing=make()).flatten()
    layout = image.layout(saved.tensors, saved.to_json())
    slot = bytearray(layout.size_bytes)
    image.copy_into(layout, memoryview(slot))
    loaded = State(thing=make())
    loaded.load(FlatState.read(*image.read(slot, copy=False)))
    slot[len(layout.head) :] = b"\xff" * (len(slot) - len(layout.head))
    assert checksum_of(loaded.flatten()) == checksum_of(saved)


def test_conjugated_and_negated_views_are_kept_apart():
    """A conjugated view has the address, the strides and the dtype of the tensor itself."""
    z = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j])
    found = round_trip({"z": z, "zc": z.conj(), "imag": z.imag, "minus": z.conj().imag})
    assert torch.equal(found["z"], z) and torch.equal(found["zc"], torch.tensor([1.0 - 2.0j, 3.0 + 4.0j]))
    assert found["imag"].tolist() == [2.0, -4.0] and found["minus"].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_of_an_object_comes_back_as_one(requires_grad):
    """The object keeps what it is given; as a plain tensor it would not be trained any more."""
    found = round_trip({"p": nn.Parameter(torch.ones(2), requires_grad=requires_grad)})["p"]
    assert type(found) is nn.Parameter and found.requires_grad == requires_grad


class Mender(Holder):
    """It changes what it loads."""

    def __init__(self, value, change):
        super().__init__(value)
        self.change = change

    def load_state_dict(self, state_dict):
        self.value = self.change(state_dict)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: {name: d[name] for name in sorted(d)},
            r"thing: saved with the keys \['b', 'a', 'n'\]; now \['a', 'b', 'n'\]",
        ),
        (lambda d: d | {"n": 2}, r"thing\.n: saved 1; now 2"),
        (lambda d: d | {"n": True}, r"thing\.n: saved 1; now true"),
        (lambda d: d | {"b": d["b"] + 1}, r"thing\.b: saved some numbers; now others"),
        (lambda d: d | {"b": d["b"][:1]}, r"thing\.b: saved torch.float32 \[2\].*; now torch.float32 \[1\]"),
        (lambda d: d | {"b": nn.Parameter(d["b"])}, r"thing\.b: saved .*; now .*parameter"),
    ],
)
def test_a_load_that_differs_is_refused_with_the_first_entry(change, words):
    """Order lost, a number changed, bits, a shape, a type: the message shows both."""
    kept = saved(State(thing=Holder({"b": torch.zeros(2), "a": None, "n": 1})))
    with pytest.raises(StateDoesNotFit, match=words):
        State(thing=Mender(None, change)).load(kept)
