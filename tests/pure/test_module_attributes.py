"""A reading that compares all attributes at once finds what one finds that looks at each."""

import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from elastic.data import stale_copies
from elastic.data.stale_copies import Attribute
from elastic.train import module_attributes
from elastic.train.module_attributes import ModuleAttributes, standing_for

PLACES = ["", "0", "1", "1.0"]
NAMES = ["p", "cache", "noise"]
VALUES = [
    lambda: 0.5,
    lambda: 1000,
    lambda: True,
    lambda: None,
    lambda: [1],
    dict,
    lambda: tuple(range(2)),  # another one each time, as a literal is not
    lambda: (torch.zeros(2),),
    lambda: torch.zeros(2),
]


def network():
    return nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Linear(1, 1)))


def twin(roots):
    """The dumb one: every attribute of every module, one after another."""
    found = {}
    for entry, root in roots.items():
        for path, module in root.named_modules(prefix=entry):
            found[path] = Attribute(module, 0)
            found[f"{path}.__class__"] = Attribute(type(module), 0)
            for name, value in vars(module).items():
                if name not in module_attributes._OF_MODULES:
                    found[f"{path}.{name}"] = Attribute(standing_for(value), stale_copies.version_of(value))
    return found


def assign(root, place, name, value):
    setattr(root.get_submodule(place), name, VALUES[value]())


def change_in_place(root, place, name, value):
    thing = getattr(root.get_submodule(place), name, None)
    if isinstance(thing, list):
        thing.append(value)
    elif isinstance(thing, dict):
        thing[value] = 1
    elif isinstance(thing, torch.Tensor):
        thing += value


def delete(root, place, name, _value):
    vars(root.get_submodule(place)).pop(name, None)


def toggle(root, place, _name, value):
    root.get_submodule(place).train(value % 2 == 0)


def hook(root, place, _name, _value):
    root.get_submodule(place).register_forward_hook(lambda *_: None)


def swap(root, place, _name, _value):
    if place == "0":
        root[0] = nn.Identity()
    elif place == "1.0":
        root[1][0] = nn.Linear(1, 1)
    else:
        root.append(nn.ReLU())


ACTIONS = [assign, change_in_place, delete, toggle, hook, swap]
OF_ACTIONS = st.tuples(
    st.sampled_from(ACTIONS),
    st.booleans(),
    st.sampled_from(PLACES),
    st.sampled_from(NAMES),
    st.integers(0, len(VALUES) - 1),
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.lists(OF_ACTIONS, max_size=3), max_size=6), is_shared=st.booleans())
def test_a_quick_reading_finds_what_a_slow_one_finds(steps, is_shared):
    """What a body may do to two networks, one perhaps a part of the other, between any readings."""
    student = network()
    teacher = student[1] if is_shared else network()
    roots = {"student": student, "teacher": teacher}
    quick, before = ModuleAttributes(), twin(roots)
    quick.read(roots)
    for actions in steps:
        for action, is_teacher, place, name, value in actions:
            if not (is_teacher and is_shared):
                action(teacher if is_teacher else student, place, name, value)
        now = twin(roots)
        assert set(quick.read(roots)) == set(stale_copies.changed(before, now))
        assert quick.now == now
        before = now


@pytest.mark.parametrize("action", [delete, assign])
def test_an_attribute_that_takes_the_place_of_another_with_the_same_value_is_found(action):
    """One is deleted and another assigned, so that the values stand in the same order as before."""
    root, value = network(), 0.5
    root.p = value
    quick = ModuleAttributes()
    quick.read({"net": root})
    delete(root, "", "p", 0)
    if action is assign:
        root.cache = value
    assert set(quick.read({"net": root})) == ({"net.p", "net.cache"} if action is assign else {"net.p"})


def test_a_list_and_a_dict_that_grow_are_found():
    root = network()
    root.kept, root.cache = [], {}
    quick = ModuleAttributes()
    quick.read({"net": root})
    root.kept.append(1)
    root.cache["a"] = 1
    assert set(quick.read({"net": root})) == {"net.kept", "net.cache"}


def test_a_module_under_another_name_is_found():
    """The modules are the same ones, in the same order; only what they are called has changed."""
    root = nn.ModuleDict({"first": nn.ReLU()})
    quick = ModuleAttributes()
    quick.read({"net": root})
    root["second"] = root.pop("first")
    assert {"net.first", "net.second"} <= set(quick.read({"net": root}))


def test_a_module_or_a_value_that_moves_to_the_next_module_is_found():
    """All names and values stand in the same order as before, but not where they did."""
    moved, value = nn.ReLU(), 0.5
    root = nn.ModuleDict({"one": nn.ModuleDict({"moved": moved}), "two": nn.ModuleDict()})
    quick = ModuleAttributes()
    quick.read({"net": root})
    root["two"]["moved"] = root["one"].pop("moved")
    assert {"net.one.moved", "net.two.moved"} <= set(quick.read({"net": root}))
    one, two = nn.Module(), nn.Module()
    vars(one)["p"] = value
    quick.read({"one": one, "two": two})
    own = dict(vars(two))
    vars(two).clear()
    vars(two).update({"p": vars(one).pop("p")} | own)
    assert set(quick.read({"one": one, "two": two})) == {"one.p", "two.p"}


@pytest.mark.parametrize(
    "form", [torch.clone, lambda x: [x], lambda x: {"x": x}], ids=["tensor", "list", "dict"]
)
def test_no_reading_keeps_alive_what_a_forward_leaves(form):
    """Else the graph of a step would live until the next reading, eight steps later."""
    root = network()
    root.output = form(root[1](torch.ones(1, 1)))
    quick = ModuleAttributes()
    quick.read({"net": root})
    output = weakref.ref(tensor_of(root.output))
    root.output = form(torch.zeros(1))
    assert output() is None
    assert quick.read({"net": root}) == ["net.output"]


def tensor_of(value):
    return (
        value
        if isinstance(value, torch.Tensor)
        else next(iter(value.values() if isinstance(value, dict) else value))
    )
