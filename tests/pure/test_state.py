"""What is flattened is loaded exactly, and what cannot be kept is refused by name."""

import copy
import math
import random
import re
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from saved_state import Holder, any_tensors, saved
from torch import nn

from elastic import State, Values
from elastic.errors import CheckpointDamaged, StateDoesNotFit, StateNotSavable, UsageError
from elastic.snapshot import image
from elastic.train.state.flat import FlatState, checksum_of


def round_trip(value):
    State(thing=(empty := Holder())).load(saved(State(thing=Holder(value))))
    return empty.value


def is_same(one, other):
    """Types, bits, strides; the order of lists and dicts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        alike = alike and (one.numel() == 0 or one.stride() == other.stride())
        return alike and torch.equal(image.tensor_bytes(one), image.tensor_bytes(other))
    if isinstance(one, dict):
        return is_same(list(one), list(other)) and is_same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other)


@st.composite
def tensors(draw):
    """Any dtype that an image keeps, 0 to 3 dimensions, sometimes empty, in any order in memory,
    any bits.
    """
    tensor = draw(any_tensors(3))
    return tensor.permute(draw(st.permutations(range(tensor.dim())))).clone()


NAMES = st.text("abcδ ", max_size=3) | st.integers()
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LEAVES = PLAIN | st.floats().map(np.float64) | tensors()


def nested(leaves, kinds=()):
    """kinds: of dicts and lists, beside the plain ones."""

    def containers(inner):
        lists, dicts = st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)
        more = [(dicts if issubclass(kind, dict) else lists).map(kind) for kind in kinds]
        return st.one_of(lists, dicts, *more)

    return st.recursive(leaves, containers, max_leaves=8)


COUNTERS = st.dictionaries(NAMES, st.integers(), max_size=3).map(Counter)


@given(st.dictionaries(NAMES, nested(LEAVES | COUNTERS, (tuple, OrderedDict)), max_size=4))
@example({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
@example({0: torch.zeros(1), "0": torch.ones(1)})
@example({"p": nn.Parameter(torch.ones(2)), "q": nn.Parameter(torch.ones(2), requires_grad=False)})
def test_any_nested_state_comes_back_as_it_was(value):
    """Ints as keys in any order, tuples, infinities, NaNs, -0.0, bfloat16, empty, transposed and
    0-dimensional tensors, keys that read alike in a path, and parameters, through real bytes.
    Nothing is changed and nothing drawn: a draw at a save would make the trajectory depend on how
    often it is saved.
    """

    def drawn():
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002

    before, places = copy.deepcopy(value), drawn()
    assert is_same(round_trip(value), before)
    checksum_of(State(thing=Holder(value)).flatten())
    assert is_same(value, before) and drawn() == places


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (0.0, -0.0),
        (1, True),
        ([1], (1,)),
        ({"0": 1}, {0: 1}),
        ({"a": 1}, Counter("a")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(2), nn.Parameter(torch.zeros(2))),
        (nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)),
        (1.0, np.float64(1.0)),
    ],
)
def test_checksum_sees_the_smallest_difference(one, other):
    """Values that == calls equal, or that print alike, and still are another state."""
    first, second = (checksum_of(State(thing=Holder({"x": each})).flatten()).whole for each in (one, other))
    assert first != second


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "found builtins.object .* the tensors, numbers and strings in it"),
        (np.zeros(2), "found numpy.ndarray"),
        (Colour.RED, "Colour"),
        (defaultdict(int), "defaultdict"),
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


@pytest.mark.parametrize("names", [["net"], ["net", "optimizer", "ema"]])
def test_a_state_of_other_objects_is_refused(names):
    """An entry too few or too many: a recipe that was edited, or another run's file."""
    kept = State(net=Holder({}), optimizer=Holder({})).flatten()
    with pytest.raises(StateDoesNotFit, match=r"it has the entries net, optimizer, and .* State has"):
        State(**{name: Holder({}) for name in names}).load(kept)


@pytest.mark.parametrize(
    "document", [{"dict": 3}, {"set": [1]}, {"tensor": "net.gone"}, {"list": [], "dict": []}]
)
def test_a_document_that_makes_no_sense_is_damage(document):
    """Never any other error: restore goes on to the next older checkpoint only after this one."""
    with pytest.raises(CheckpointDamaged):
        State(net=Holder({})).load(FlatState(tensors={}, document={"net": document}))


@pytest.mark.parametrize(
    "thing", [object(), object, {"net": nn.Linear(1, 1)}, torch.jit.script(nn.Linear(2, 2))]
)
def test_an_object_without_a_state_dict_is_refused_at_once(thing):
    """Said when the recipe starts, not at the first save."""
    with pytest.raises(UsageError, match=r"State\(net=\.\.\.\): expected an object .*elastic\.Values\(net="):
        State(net=thing)
    with pytest.raises(UsageError, match="found none"):
        State()


class Keeper(nn.BatchNorm1d):
    """A module with more state than its tensors, which it keeps as it is given."""

    def __init__(self):
        super().__init__(2)
        self.kept = torch.arange(3.0)

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.mark.parametrize("make", [Keeper, lambda: Holder({"x": torch.ones(3)})], ids=["module", "object"])
def test_a_loaded_state_shares_no_memory_with_the_image(make):
    """The image is a slot of the memory for snapshots, which is filled with other bytes later."""
    kept = State(thing=make()).flatten()
    layout = image.layout(kept.tensors, kept.to_json())
    slot = bytearray(layout.size_bytes)
    image.copy_into(layout, memoryview(slot))
    loaded = State(thing=make())
    loaded.load(FlatState.read(*image.read(slot)))
    slot[len(layout.head) :] = b"\xff" * (len(slot) - len(layout.head))
    assert checksum_of(loaded.flatten()) == checksum_of(kept)


def test_conjugated_and_negated_views_are_kept_apart():
    """A conjugated view has the address, the strides and the dtype of the tensor itself."""
    z = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j])
    found = round_trip({"z": z, "zc": z.conj(), "imag": z.imag, "minus": z.conj().imag})
    assert torch.equal(found["z"], z) and torch.equal(found["zc"], torch.tensor([1.0 - 2.0j, 3.0 + 4.0j]))
    assert found["imag"].tolist() == [2.0, -4.0] and found["minus"].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: {n: d[n] for n in "abn"}, r"thing: saved dict \['b', 'a', 'n'\]; now dict \['a', 'b'"),
        (lambda d: d | {"n": True}, r"thing\.n: saved 1; now true"),
        (lambda d: d | {"b": d["b"] + 1}, r"the tensor thing\.b: saved \w+ torch.float32 \[2\]"),
        (lambda d: d | {"b": d["b"][:1]}, r"thing\.b: saved .* \[2\].*; now \w+ torch.float32 \[1\]"),
        (lambda d: d | {"b": nn.Parameter(d["b"])}, r"thing\.b: saved .*; now .*parameter"),
    ],
)
def test_a_load_that_differs_is_refused_with_the_first_entry(change, words):
    """Order lost, a number changed, bits, a shape, a type: the message shows both."""
    kept = saved(State(thing=Holder({"b": torch.zeros(2), "a": None, "n": 1})))
    with pytest.raises(StateDoesNotFit, match=words):
        State(thing=Holder(change=change)).load(kept)


# elastic.Values: what a recipe's loop keeps by name.

CONTENTS = nested(LEAVES)


@given(before=CONTENTS, after=CONTENTS)
def test_values_come_back_as_they_were(before, after):
    """Tensors, lists and dicts, with types and order, in the place of any other value."""
    values = Values(held=before)
    values.held = after
    expected = copy.deepcopy(values.held)
    State(values=(fresh := Values(held=before))).load(State(values=values).flatten())
    assert is_same(fresh.held, expected)


def test_a_number_in_a_tensor_becomes_the_number():
    """A loss is a tensor often, without dimensions; it must not drag its graph along. A whole one
    may be BatchNorm's count of batches in a dict, which load_state_dict takes as a tensor.
    """
    values = Values(best=math.inf)
    values.best = torch.tensor(2.5, requires_grad=True)
    assert (values.best, type(values.best)) == (2.5, float)
    count, loss = Values(history=[torch.tensor(3), torch.tensor(0.5)]).history
    assert is_same(count, torch.tensor(3)) and is_same(loss, 0.5)


def test_a_name_for_a_part_of_a_value_survives_a_load():
    """A list in a dict, and a tensor that the recipe looked up before its loop."""
    before = Values(of={"train": [1.0, 2.0]}, center=torch.arange(3.0))
    values = Values(of={"train": []}, center=torch.zeros(3))
    recent, center = values.of["train"], values.center
    State(values=values).load(State(values=before).flatten())
    recent.append(0.0)
    assert values.of == {"train": [1.0, 2.0, 0.0]}
    assert center.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Colour.RED, "found Colour"),
        ({1, 2}, "found set"),
        (Counter("a"), "found Counter"),
        ({None: 1}, "keep a list of pairs"),
        (np.zeros(2), "found ndarray"),
        (torch.ones(2).to(torch.uint32), "Tensor of torch.uint32"),
    ],
)
def test_a_value_that_no_state_can_keep_is_refused(value, words):
    """Where it is set, alone and inside a list; put into a list or dict, where the state is taken.
    An IntEnum is no int, lest it come back as one.
    """
    values = Values(best=0, of={"train": [0] * 500})
    for each in (value, [value]):
        with pytest.raises(UsageError, match=rf"at best.*{re.escape(words)}"):
            values.best = each
    values.of["train"].append({"a": (value,)})
    with pytest.raises(UsageError, match=rf"at of\['train'\]\[500\]\['a'\]\[0\].*{re.escape(words)}"):
        values.state_dict()


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_or_dict_at_two_places_is_refused(kind):
    """It came back as two, so that what was appended to the newest epoch's list after a kill was
    missing in the history: another result, and nothing said so.
    """
    values = Values(current=kind(), epochs=[])
    values.epochs.append(values.current)
    with pytest.raises(UsageError, match=r"epochs\[0\], found the one at current.*put a copy there"):
        values.state_dict()
    values.epochs[0] = kind(values.current)
    assert values.state_dict() == {"current": kind(), "epochs": [kind()]}
    values.epochs.append(torch.zeros(2, requires_grad=True) * 2)
    with pytest.raises(UsageError, match="part of a graph"):
        values.state_dict()


def test_a_slip_of_the_pen_makes_no_new_value():
    """Set and read under a name that was not given; also a name of the class's own."""
    values = Values(best=0)
    with pytest.raises(AttributeError, match=r"expected one of the values \['best'\], found 'bset'"):
        values.bset = 1
    with pytest.raises(UsageError, match=r"Values\(bset=\.\.\.\)"):
        values.bset  # noqa: B018
    assert not hasattr(values, "bset")
    for taken in ("state_dict", "_best"):
        with pytest.raises(UsageError, match="another name"):
            Values(**{taken: 0})
