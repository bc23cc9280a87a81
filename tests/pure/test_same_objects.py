"""After a load a recipe's names for parts of an object still belong to it."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_state import saved
from torch import nn
from torch.optim import lr_scheduler

from elastic.train.state.flat import checksum_of
from elastic.train.state.same_objects import SameObjects
from elastic.train.state.state import State


class Box:
    """Its load puts new parts into the place of the old ones, as `self.x = state["x"]` does."""

    def __init__(self, value):
        self.value = value


def tensor(number):
    return torch.full((2,), float(number))


leaves = st.integers() | st.text(max_size=2) | st.none() | st.integers(0, 3).map(tensor)
parts = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=3))
        | st.sets(st.integers(), max_size=3)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3).map(lambda items: defaultdict(list, items))
        | st.dictionaries(st.text(max_size=1), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


def is_same(one, other):
    """Types, numbers, order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def reachable(value):
    yield value
    if isinstance(value, dict):
        for item in value.values():
            yield from reachable(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from reachable(item)


@given(parts, parts)
def test_whatever_was_there_before_the_object_has_what_was_loaded(before, loaded):
    """Parts of other kinds and sizes, and none at all, in the same places."""
    box, expected = Box(before), copy.deepcopy(loaded)
    noted = SameObjects(box, frozenset())
    box.value = loaded
    noted.put_back()
    assert is_same(box.value, expected)


@given(parts, st.integers(0, 3))
def test_parts_of_the_same_kind_stay_the_same_objects(before, number):
    """The load gives equal parts with other numbers: each name that was held sees the new ones."""

    def renewed(value):
        if isinstance(value, torch.Tensor):
            return tensor(number)
        if isinstance(value, deque):
            return deque(map(renewed, value), maxlen=value.maxlen)
        if isinstance(value, list | tuple):
            return type(value)(map(renewed, value))
        if isinstance(value, dict):
            new = copy.copy(value)
            new.clear()
            for name, item in value.items():
                new[name] = renewed(item)
            return new
        return copy.copy(value)

    box, names = Box(before), list(reachable(before))
    noted = SameObjects(box, frozenset())
    loaded = renewed(before)
    expected = copy.deepcopy(loaded)
    box.value = loaded
    noted.put_back()
    assert is_same(box.value, expected)
    assert all(one is other for one, other in zip(names, reachable(box.value), strict=True))


def test_parts_that_a_load_exchanged_are_left_where_it_put_them():
    """The contents of each would be written over those of the other."""
    one, other, a, b = tensor(1), tensor(2), [1], [2]
    box = Box({"one": one, "other": other, "a": a, "b": b})
    noted = SameObjects(box, frozenset())
    box.value = {"one": other, "other": one, "a": b, "b": a}
    noted.put_back()
    assert box.value["one"] is other and box.value["b"] is a
    assert (one[0], other[0], a, b) == (1, 2, [1], [2])


def test_one_name_for_two_places_is_kept_in_one_of_them():
    """As built both places had one list and one tensor, and what is loaded has two of each."""
    items, number = [0], tensor(0)
    box = Box({"a": items, "b": items, "x": number, "y": number})
    noted = SameObjects(box, frozenset())
    box.value = {"a": [1], "b": [2], "x": tensor(1), "y": tensor(2)}
    noted.put_back()
    assert (box.value["a"], box.value["b"]) == ([1], [2]) and box.value["a"] is items
    assert (box.value["x"][0], box.value["y"][0]) == (1, 2) and box.value["x"] is number


def test_what_shared_memory_after_the_load_shares_it_still():
    flat = torch.zeros(4)
    box = Box({"flat": flat, "part": flat[:2]})
    noted = SameObjects(box, frozenset())
    whole = torch.ones(4)
    box.value = {"flat": whole, "part": whole[:2]}
    noted.put_back()
    flat.fill_(5.0)
    assert box.value["flat"] is flat and box.value["part"].tolist() == [5.0, 5.0]


def trained(make):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = make(net.parameters())
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1, 2])
    state = State(net=net, optimizer=optimizer, scheduler=scheduler)

    def step():
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    return state, step


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1),
    ],
    ids=["sgd", "adamw with a tensor as rate", "adagrad", "lbfgs"],
)
def test_names_for_parts_of_an_optimizer_survive_a_load(make):
    """The groups, a group, its list, the state, a parameter's state, its tensors."""
    if make(nn.Linear(1, 1).parameters()).__class__ is torch.optim.LBFGS:
        state, step = trained(make)[0], lambda: None
    else:
        state, step = trained(make)
    step()
    kept = saved(state)
    step()
    optimizer, scheduler = state.objects["optimizer"], state.objects["scheduler"]
    groups, of_parameters, rates = optimizer.param_groups, optimizer.state, scheduler.base_lrs
    names = [*groups, *(group["params"] for group in groups), *of_parameters.values()]
    tensors = [value for of_one in of_parameters.values() for value in of_one.values()]
    state.load(kept)
    assert optimizer.param_groups is groups and optimizer.state is of_parameters
    assert scheduler.base_lrs is rates
    found = [*groups, *(group["params"] for group in groups), *of_parameters.values()]
    assert all(one is other for one, other in zip(names, found, strict=True))
    now = [value for of_one in of_parameters.values() for value in of_one.values()]
    assert all(one is other for one, other in zip(tensors, now, strict=True) if torch.is_tensor(one))
    assert checksum_of(state.flatten()) == checksum_of(kept)


def test_a_rate_set_through_a_name_from_before_the_load_has_effect():
    """`group = optimizer.param_groups[0]` above the loop, and `group["lr"] = ...` in it."""
    results = []
    for restarts in (False, True):
        state, step = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        step()
        if restarts:
            kept = saved(state)
            state, step = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
            group = state.objects["optimizer"].param_groups[0]
            state.load(kept)
        else:
            group = state.objects["optimizer"].param_groups[0]
        group["lr"] = 0.5
        step()
        results.append(checksum_of(state.flatten()))
    assert results[0] == results[1]


class Trainer:
    """An object of the recipe's own that holds an optimizer and a history."""

    def __init__(self, net):
        self.optimizer = torch.optim.Adam(net.parameters())
        self.history, self.average = [], {"w": torch.zeros(2, 3)}

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "history": self.history, "average": self.average}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.history, self.average = state_dict["history"], state_dict["average"]


def test_names_for_parts_of_an_own_object_survive_a_load():
    net = nn.Linear(3, 2)
    trainer = Trainer(net)
    state = State(net=net, trainer=trainer)
    trainer.history.append(1)
    trainer.average["w"] += 1
    kept = saved(state)
    group, history, average, weight = (
        trainer.optimizer.param_groups[0],
        trainer.history,
        trainer.average,
        trainer.average["w"],
    )
    history.append(2)
    weight += 1
    state.load(kept)
    assert trainer.optimizer.param_groups[0] is group
    assert trainer.history is history == [1]
    assert trainer.average is average and average["w"] is weight and weight[0, 0] == 1


class Slow:
    """Lookahead's slow weights, kept as they are given."""

    def __init__(self, net):
        self.slow = list(net.parameters())

    def state_dict(self):
        return {"slow": self.slow}

    def load_state_dict(self, state_dict):
        self.slow = state_dict["slow"]


def test_weights_kept_without_a_copy_are_the_models_again_after_a_load():
    """They follow the model in a calm run. As copies they would stand still after a restart."""
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    slow, theirs = Slow(net), Slow(other)
    theirs.slow = [each.detach().clone() for each in other.parameters()]  # built otherwise
    state = State(net=other, slow=theirs)
    state.load(saved(State(net=net, slow=slow)))
    assert all(one is each for one, each in zip(theirs.slow, other.parameters(), strict=True))


def test_weights_kept_as_copies_do_not_become_the_models_by_a_load():
    """As built the object had the model's own parameters, and copies after some step."""
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    slow, theirs = Slow(net), Slow(other)
    slow.slow = [nn.Parameter(each.detach() + 1) for each in net.parameters()]
    state = State(net=other, slow=theirs)
    kept = saved(State(net=net, slow=slow))
    state.load(kept)
    assert checksum_of(state.flatten()) == checksum_of(kept)
    assert not any(one is each for one, each in zip(theirs.slow, other.parameters(), strict=True))
