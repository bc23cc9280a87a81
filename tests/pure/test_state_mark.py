"""What a step's body changed in the state is seen without a copy of it."""

import numpy as np
import pytest
import torch
from torch import nn

from elastic import Values
from elastic.train.state_mark import looks_forgotten, mark_of, whole_mark_of


def _set(values, name, value):
    setattr(values, name, value)


CHANGES = {
    "weights": lambda net, _values: nn.init.zeros_(net.weight),
    "number": lambda _net, values: _set(values, "patience", 1),
    "not a number": lambda _net, values: _set(values, "patience", float("nan")),
    "item": lambda _net, values: values.recent.append(0.0),
    "item of a dict": lambda _net, values: values.best.update(loss=0.5),
    "tensor in place": lambda _net, values: values.center.add_(1),
    "array in place": lambda _net, values: values.counts.__setitem__(0, 7),
    "another tensor": lambda _net, values: _set(values, "center", torch.zeros(2)),
}


@pytest.fixture
def made():
    values = Values(
        patience=0, least=float("nan"), recent=[0.1], best={}, center=torch.zeros(2), counts=np.zeros(3)
    )
    return nn.Linear(2, 2), values


def mark(net, values):
    return mark_of(list(net.parameters()), [net, values])


BESIDE = {
    "the mode of a module": lambda net, _optimizer: net[0].eval(),
    "the statistics of a layer": lambda net, _optimizer: net(torch.randn(4, 2)),
    "a weight": lambda net, _optimizer: nn.init.zeros_(net[1].weight),
    "a learning rate": lambda _net, optimizer: optimizer.param_groups[0].update(lr=0.0),
    "what trains": lambda net, _optimizer: net[1].weight.requires_grad_(False),
    "a number of a layer": lambda net, _optimizer: setattr(net[0], "momentum", 0.5),
    "a hook": lambda net, _optimizer: net[1].register_forward_hook(lambda *_: None),
    "a moment": lambda net, optimizer: optimizer.state[net[1].weight]["momentum_buffer"].zero_(),
    "a hook on a gradient": lambda net, _optimizer: net[1].weight.register_hook(lambda grad: grad / 2),
    "a hook of an optimizer": lambda _net, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "what an optimizer updates": lambda _net, optimizer: optimizer.param_groups[0]["params"].pop(),
    "a flag": lambda _net, optimizer: optimizer.param_groups[0].update(nesterov=True),
}


@pytest.mark.parametrize("change", BESIDE.values(), ids=BESIDE)
def test_what_a_function_beside_the_loop_changes_is_seen(change):
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    before = whole_mark_of([net, optimizer])
    with torch.no_grad():  # an evaluation that puts the mode back
        net.eval()
        net(torch.randn(4, 2))
        net.train()
    net[1].weight.register_hook(lambda _: None).remove()
    optimizer.register_step_post_hook(lambda *_: None).remove()
    assert whole_mark_of([net, optimizer]) == before
    change(net, optimizer)
    assert whole_mark_of([net, optimizer]) != before


def test_a_state_that_was_read_alone_has_the_same_mark(made):
    net, values = made
    before = mark(*made)
    net(values.center).sum().backward()
    assert values.recent[0] + values.least != values.patience
    assert mark(*made) == before


LONG = {
    "a large array": np.zeros(100_000),
    "a long list": [0.0] * 5000,
    "a list of lists": [[0.0]] * 1500,
    "a large dict": dict.fromkeys(range(5000), 0.0),
}


@pytest.mark.parametrize("held", LONG.values(), ids=LONG)
def test_a_change_is_seen_whatever_the_size(held):
    values = Values(held=held)
    before = mark_of([], [values])
    assert mark_of([], [values]) == before
    values.held[4321 if len(values.held) > 4321 else 1400] = 1.0
    assert mark_of([], [values]) != before


@pytest.mark.parametrize("held", LONG.values(), ids=LONG)
def test_a_whole_mark_sees_a_change_in_the_middle_of_the_largest(held):
    many = (
        np.zeros(400_000)
        if isinstance(held, np.ndarray)
        else [*held] * 60
        if isinstance(held, list)
        else held
    )
    values = Values(held=many)
    before = whole_mark_of([values])
    assert whole_mark_of([values]) == before
    values.held[len(many) // 2] = 1.0
    assert whole_mark_of([values]) != before


def test_a_look_at_the_state_of_an_optimizer_is_no_change():
    """It has no state for a parameter that does not train, and makes an empty one for who asks."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    saved, before = optimizer.state_dict(), whole_mark_of([optimizer])
    with looks_forgotten([net, optimizer]):
        for parameter in net.parameters():
            assert optimizer.state[parameter].get("exp_avg") is None
    assert (optimizer.state_dict(), whole_mark_of([optimizer])) == (saved, before)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(made, change):
    before = mark(*made)
    change(*made)
    assert mark(*made) != before
