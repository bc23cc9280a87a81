"""A load gives an object what it had, and one that is not exact is refused where the run begins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_state import saved
from torch import nn
from torch.optim import lr_scheduler

from elastic.errors import UsageError
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


class Lookahead:
    """Slow weights that follow the fast ones, as published: k steps forward, one back."""

    def __init__(self, net):
        self.net, self.slow, self.count = net, [p.detach().clone() for p in net.parameters()], 0

    def step(self):
        self.count += 1
        for slow, fast in zip(self.slow, self.net.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.5)

    def state_dict(self):
        return {"slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict):
        self.slow, self.count = state_dict["slow"], state_dict["count"]


class Refuses(Lookahead):
    def load_state_dict(self, state_dict):
        raise KeyError("fast_state")


class Rounds(Lookahead):
    def load_state_dict(self, state_dict):
        self.slow = [each.half().float() for each in state_dict["slow"]]


class Torn(Lookahead):
    """The weights of the model itself, until a load copies them."""

    def __init__(self, net):
        super().__init__(net)
        self.slow = list(net.parameters())

    def load_state_dict(self, state_dict):
        self.slow = [nn.Parameter(each.clone()) for each in state_dict["slow"]]


def begun(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    return State(net=net, optimizer=optimizer, look=kind(net))


def train(state):
    net, optimizer, look = (state.objects[name] for name in ("net", "optimizer", "look"))
    net(torch.ones(3, 2)).square().sum().backward()
    optimizer.step()
    look.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Refuses, "look does not take it: 'fast_state'"),
        (Rounds, r"look\.slow\.0: saved some numbers; now others"),
        (Torn, r"(look|net)\..*: saved memory of look\.slow\.\d"),
    ],
)
def test_an_object_with_an_inexact_load_is_refused_at_once(kind, words):
    """After a kill it would be exit 76, hours later. The model keeps what it has."""
    state = begun(kind)
    before = checksum_of(State(net=state.objects["net"]).flatten())
    with pytest.raises(UsageError, match=f"a trial load .*{words}"):
        state.load_as_built()
    assert checksum_of(State(net=state.objects["net"]).flatten()) == before


def test_an_exact_load_leaves_no_trace():
    """The twin is never loaded. Drawn numbers and the tensors of modules stay where they are; a
    copy of a large model might not fit into a GPU's memory.
    """
    state, twin = begun(Lookahead), begun(Lookahead)
    drawn = torch.get_rng_state()
    places = [each.data_ptr() for each in state.objects["net"].state_dict().values()]
    assert state.load_as_built() == checksum_of(twin.flatten())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert places == [each.data_ptr() for each in state.objects["net"].state_dict().values()]
    train(state), train(twin)
    train(state), train(twin)
    assert checksum_of(state.flatten()) == checksum_of(twin.flatten())


class Views:
    """One flat buffer, and a part of it under a second name."""

    def __init__(self):
        self.flat = torch.zeros(4)
        self.head = self.flat[:2]

    def state_dict(self):
        return {"flat": self.flat, "head": self.head}

    def load_state_dict(self, state_dict):
        self.flat, self.head = state_dict["flat"], state_dict["head"]


def test_a_part_that_is_torn_from_its_whole_is_refused():
    """Only a trial sees it: a checkpoint does not say that memory was shared in part."""
    with pytest.raises(UsageError, match=r"parts\.head does not share the memory of parts\.flat any more"):
        State(parts=Views()).load_as_built()


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
    ],
    ids=["sgd", "adamw with a tensor as rate", "adagrad"],
)
def test_names_for_parts_of_an_optimizer_survive_a_load(make):
    """The groups, a group, its list, the state, a parameter's state, its tensors."""
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


def late(order):
    """Adam, whose parameters had their first gradients in this order."""
    torch.manual_seed(0)
    net = nn.ParameterDict({name: nn.Parameter(torch.randn(2)) for name in "abc"})
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    state = State(net=net, optimizer=optimizer)
    state.load_as_built()
    for name in order:
        net[name].square().sum().backward()
        optimizer.step()
    return state


@given(st.permutations("abc"))
def test_an_optimizers_state_keeps_the_order_of_the_calm_run(order):
    """A recipe that adds up norms of momenta adds floats in that order."""
    state, other = late(order), late("")
    other.load(saved(state))
    one, its = (each.objects["optimizer"] for each in (state, other))
    names = [
        [name for p in each.state for name, mine in net.items() if mine is p]
        for each, net in ((one, state.objects["net"]), (its, other.objects["net"]))
    ]
    assert names[0] == names[1] == list(order)
    assert [list(of_one) for of_one in one.state.values()] == [list(of_one) for of_one in its.state.values()]
    assert list(one.param_groups[0]) == list(its.param_groups[0])
