"""Dicts whose order is no part of a state come back in the order that they had."""

import json
from collections import Counter, OrderedDict

import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_state import saved
from torch import nn

from elastic.train.state.key_order import in_order, key_orders
from elastic.train.state.state import State

names = st.text("abc", min_size=1, max_size=2) | st.integers(0, 12)
values = st.recursive(
    st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)


def ordered_keys(value):
    if isinstance(value, dict):
        return [list(value), [ordered_keys(item) for item in value.values()]]
    return [ordered_keys(item) for item in value] if isinstance(value, list | tuple) else None


@given(st.permutations(["lr", "betas", "params"]), st.permutations([0, 1, 10, 2]), values)
def test_sorted_dicts_get_their_orders_back(group_keys, indices, value):
    """Sorted as in a document: ints before strings, and as numbers."""
    groups = [dict.fromkeys(group_keys, value) for _ in range(2)]
    before = {
        "state": {index: {"step": 1, "exp_avg": Counter(a=1)} for index in indices},
        "param_groups": groups,
    }
    orders = json.loads(json.dumps(key_orders(before)))

    def by_name(thing):
        if isinstance(thing, dict):
            return {key: by_name(thing[key]) for key in sorted(thing, key=lambda k: (type(k) is str, k))}
        return [by_name(item) for item in thing] if isinstance(thing, list) else thing

    assert ordered_keys(in_order(by_name(before), orders)) == ordered_keys(before)


def test_sorted_dicts_take_no_room_and_equal_orders_are_kept_once():
    assert key_orders({"a": {0: 1, 1: 2}, "b": [{"x": 1, "y": 2}]}) == []
    assert key_orders([{"y": 1, "x": 2}, {"y": 3, "x": 4}, OrderedDict(y=1, x=1)]) == [["y", "x"]]


def late(order):
    """Adam, whose parameters had their first gradients in this order."""
    torch.manual_seed(0)
    net = nn.ParameterDict({name: nn.Parameter(torch.randn(2)) for name in "abc"})
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    for name in order:
        net[name].square().sum().backward()
        optimizer.step()
    return State(net=net, optimizer=optimizer)


@given(st.permutations("abc"))
def test_an_optimizers_state_is_gone_through_in_the_order_of_the_calm_run(order):
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
