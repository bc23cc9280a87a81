"""What a state cannot keep is refused with what to write instead, and that works."""

import random
from collections import defaultdict, deque, namedtuple
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_state import saved
from torch import nn
from torch.optim import SGD, lr_scheduler

from elastic.errors import StateNotSavable, UsageError
from elastic.train.state.state import State
from elastic.train.state.unsavable import advice

Point = namedtuple("Point", "x y")  # noqa: PYI024 - the plain kind, as recipes have it


class Kind(IntEnum):
    A = 1


class Own:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


NAMES = {
    "torch": torch,
    "deque": lambda items, maxlen: deque(items, 3),
    "Kind": Kind,
    "Point": Point,
    "Path": Path,
}


@pytest.mark.parametrize(
    "value",
    [
        {3, 1, 2},
        frozenset("ab"),
        deque([1, 2], maxlen=3),
        np.arange(6.0).reshape(2, 3),
        np.int64(3),
        Kind.A,
        Point(1, 2),
        torch.Size([2, 3]),
        b"bytes",
        1 + 2j,
        Path("a/b"),
        torch.bfloat16,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_advised_for_a_value_keeps_it(value):
    """Both expressions are run, through the bytes of a checkpoint."""
    with pytest.raises(StateNotSavable) as caught:
        State(own=Own(value)).flatten()
    words = str(caught.value)
    assert words.startswith(
        "state entry own.value: expected tensors, numbers, strings, lists and dicts, found"
    )
    given, made = words.partition("with x for it: give ")[2].split(" in state_dict, and ")
    made = (
        made.removeprefix("in load_state_dict ")
        .removeprefix("make ")
        .removesuffix(" of it in load_state_dict")
    )
    made, _, other = made.partition("; ")
    assert other == "elastic.Values(name=array) takes arrays as they are" * isinstance(value, np.ndarray)
    kept, loaded = Own(eval(given, NAMES | {"x": value})), Own(None)
    State(own=loaded).load(saved(State(own=kept)))
    found = eval(made.replace("...", "3"), NAMES | {"saved": loaded.value})
    assert type(found) in (type(value), int, frozenset, set) and np.all(found == value)


@pytest.mark.parametrize(
    "make",
    [lambda: random.Random(3), lambda: np.random.default_rng(3), lambda: torch.Generator().manual_seed(3)],
    ids=["random", "numpy", "torch"],
)
def test_what_is_advised_for_a_generator_keeps_it(make):
    """It goes on with the same numbers."""

    def draw(generator):
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        return [generator.random() for _ in range(3)]

    generator, other = make(), make()
    draw(generator)
    given, made = advice(generator).removeprefix("give ").split(" in state_dict, and in load_state_dict ")
    kept, loaded = Own(eval(given, {"x": generator})), Own(None)
    State(own=loaded).load(saved(State(own=kept)))
    exec(made, {"x": other, "saved": loaded.value})
    assert draw(other) == draw(generator)


def test_a_dict_by_name_keeps_its_pairs():
    """A Q table by (row, column)."""
    with pytest.raises(StateNotSavable, match=r"give a list of pairs, list\(x\.items\(\)\)"):
        State(own=Own({(1, 2): 0.5})).flatten()
    loaded = Own(None)
    State(own=loaded).load(saved(State(own=Own(list({(1, 2): 0.5}.items())))))
    assert dict(loaded.value) == {(1, 2): 0.5}


def test_an_object_with_a_state_of_its_own_is_told_where_it_belongs():
    scheduler = lr_scheduler.StepLR(SGD(nn.Linear(1, 1).parameters()), 3)
    with pytest.raises(StateNotSavable, match=r"State\(scheduler=scheduler\), or give x\.state_dict\(\)"):
        State(own=Own({"scheduler": scheduler})).flatten()


class OwnAdam:
    """An optimizer by hand, without a state_dict."""


class Half(OwnAdam):
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (
            OwnAdam(),
            r"give the class OwnAdam the missing state_dict and load_state_dict: state_dict\(self\) returns",
        ),
        (Half(), "give the class Half the missing load_state_dict: "),
        (OwnAdam, r"give an instance: State\(opt=OwnAdam\(\.\.\.\)\)"),
        ({"net": nn.Linear(1, 1)}, r"State\(\*\*objects\)"),
        ([nn.Linear(1, 1)], r"State\(opt_0=\.\.\., opt_1=\.\.\.\), or modules as an nn\.ModuleList"),
        (nn.Parameter(torch.ones(1)), "opt = nn.ParameterDict"),
        (torch.ones(1), "give a class that holds it the missing state_dict and load_state_dict"),
        (0.5, r"elastic\.Values\(opt=\.\.\.\)"),
        (torch.Generator(), r"give x\.get_state\(\) in state_dict"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_has_no_state_dict_is_told_what_to_write(thing, words):
    with pytest.raises(UsageError, match=rf"State\(opt=\.\.\.\): expected an object .*{words}"):
        State(opt=thing)


def test_a_defaultdict_is_filled_again():
    table = defaultdict(list, a=[1])
    given, made = advice(table).removeprefix("give ").split(" in state_dict, and in load_state_dict ")
    again = defaultdict(list)
    exec(made, {"x": again, "saved": eval(given, {"x": table})})
    assert again == table


def test_an_optimizer_that_torch_has_not_built_is_refused_with_what_to_call():
    """A wrapper that takes over the groups of another one: torch's state_dict misses its hooks."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            self.base, self.param_groups, self.state = base, base.param_groups, defaultdict(dict)

    class Saved(Lookahead):
        def state_dict(self):
            return {"slow": []}

        def load_state_dict(self, saved):
            pass

    base = SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(
        UsageError, match=r"State\(look=...\): Lookahead .* has not called super\(\).__init__"
    ):
        State(base=base, look=Lookahead(base))
    assert State(base=base, look=Saved(base)).flatten()


@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(1, 2))])
def test_a_module_of_torchscript_is_refused_with_what_to_write_instead(make):
    """Its dicts of parameters are none of Python's, which was a bare TypeError."""
    net = nn.Sequential(make(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"found a module of TorchScript .* at net\.0.*model\.compile\(\)"):
        State(net=net)
