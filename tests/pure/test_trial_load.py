"""A load that is not exact is refused where the run begins, and an exact one leaves no trace."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import StateDoesNotFit, UsageError
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State
from elastic.train.state.trial_load import load_as_built, load_own_again
from elastic.train.step.contract import Contract


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


class Resets(Lookahead):
    def state_dict(self):
        return {"slow": self.slow}

    def load_state_dict(self, state_dict):
        self.__init__(self.net)
        self.slow = state_dict["slow"]


class Writes(Lookahead):
    """Its load gives the model the slow weights."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for slow, fast in zip(self.slow, self.net.parameters(), strict=True):
                fast.copy_(slow)


class Torn(Lookahead):
    """The weights of the model itself, until a load copies them."""

    def __init__(self, net):
        super().__init__(net)
        self.slow = list(net.parameters())

    def load_state_dict(self, state_dict):
        self.slow = copy.deepcopy(state_dict["slow"])


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
        (Rounds, r"look\.slow\.0: other numbers"),
        (Torn, r"(look|net)\..*: it shared the memory of look\.slow\.\d, and does not any more"),
    ],
)
def test_an_object_that_loads_another_state_than_its_own_is_refused_before_the_first_step(kind, words):
    """After a kill it would be exit 76, hours later. The model keeps what it has."""
    state = begun(kind)
    before = checksum_of(State(net=state.objects["net"]).flatten())
    with pytest.raises(UsageError, match=f"a trial load before the first step, .*: {words}"):
        load_as_built(state)
    assert checksum_of(State(net=state.objects["net"]).flatten()) == before


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Resets, "look.count was 1 and is 0; its state_dict does not give it"),
        (Writes, r"net\.0\.bias: other numbers"),
    ],
)
def test_what_only_shows_once_steps_have_changed_the_state_is_refused_after_the_first(kind, words):
    """As built a count is 0, and slow weights are the fast ones."""
    state = begun(kind)
    load_as_built(state)
    train(state)
    with pytest.raises(UsageError, match=f"a trial load after the first step, .*: {words}"):
        load_own_again(state)


def test_an_exact_load_leaves_no_trace():
    """The twin is never loaded. Drawn numbers, modes and tensors stay; names still belong."""
    state, twin = begun(Lookahead), begun(Lookahead)
    drawn = torch.get_rng_state()
    slow, group = state.objects["look"].slow, state.objects["optimizer"].param_groups[0]
    load_as_built(state)
    assert torch.equal(torch.get_rng_state(), drawn)
    train(state), train(twin)
    load_own_again(state)
    train(state), train(twin)
    assert checksum_of(state.flatten()) == checksum_of(twin.flatten())
    assert state.objects["look"].slow is slow and state.objects["optimizer"].param_groups[0] is group


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
    with pytest.raises(UsageError, match=r"parts\.head: it shared a part of the memory of parts\.flat"):
        load_as_built(State(parts=Views()))


def test_modules_and_optimizers_of_torch_are_not_copied_for_a_trial():
    """A copy of a large model might not fit into a GPU's memory."""
    state = begun(Lookahead)
    train(state)
    state = State(net=state.objects["net"], optimizer=state.objects["optimizer"])
    places = {name: tensor.data_ptr() for name, tensor in state.flatten().tensors.items()}
    load_own_again(state)
    assert places == {name: tensor.data_ptr() for name, tensor in state.flatten().tensors.items()}
    net = State(net=state.objects["net"])
    load_as_built(net)
    assert all(places[name] == tensor.data_ptr() for name, tensor in net.flatten().tensors.items())


class Replay:
    """Priorities as an array, and a generator; `in_place`: its load fills what is there."""

    def __init__(self, *, in_place):
        self.in_place, self.priorities = in_place, np.zeros(3)
        self.generator = torch.Generator().manual_seed(0)

    def state_dict(self):
        return {"priorities": torch.from_numpy(self.priorities), "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict):
        if not self.in_place:
            self.priorities, self.generator = state_dict["priorities"].numpy(), torch.Generator()
        self.priorities[...] = state_dict["priorities"].numpy()
        self.generator.set_state(state_dict["generator"])


@pytest.mark.parametrize("part", ["priorities", "generator"])
def test_an_array_that_a_load_replaces_is_refused_only_where_a_name_still_holds_it(part):
    """`priorities = replay.priorities` above the loop: what it writes there would reach nothing."""
    load_as_built(State(replay=Replay(in_place=False)))
    replay = Replay(in_place=False)
    held = getattr(replay, part)
    with pytest.raises(
        UsageError, match=rf"replay\.{part} is another object now, .* self\.array\[\.\.\.\] = saved"
    ):
        load_as_built(State(replay=replay))
    assert held is not getattr(replay, part)
    replay = Replay(in_place=True)
    held = getattr(replay, part)
    load_as_built(State(replay=replay))
    assert held is getattr(replay, part)


def test_what_a_step_has_looked_up_does_not_count_as_a_name_that_holds_an_array():
    """A computation keeps what the State consisted of where it began, to the end of the step."""
    state = State(replay=Replay(in_place=False), net=nn.Linear(2, 2))
    load_as_built(state)
    contract = Contract(state, global_batch=1, shards=1)
    contract.begin_computation(None)
    load_own_again(state)
    assert contract.parts.modules == [state.objects["net"]]


class Pool:
    """Active learning: what is not labelled yet is a set."""

    def __init__(self, listed, many=150):
        self.listed, self.unlabelled, self.labelled = listed, set(range(many)), []

    def query(self, wanted):
        for each in wanted:  # the set keeps the size that it had
            self.unlabelled.discard(each)
        self.labelled += wanted

    def state_dict(self):
        return {"unlabelled": self.listed(self.unlabelled), "labelled": self.labelled}

    def load_state_dict(self, saved):
        self.unlabelled, self.labelled = set(saved["unlabelled"]), list(saved["labelled"])


@pytest.mark.parametrize("listed", [list, tuple, dict.fromkeys])
def test_a_state_dict_in_the_order_of_a_set_is_refused_before_the_first_step(listed):
    """A load of what was built gives the same order again; one of a set that shrank does not."""
    pool = Pool(listed)
    with pytest.raises(UsageError, match=r"pool\.unlabelled.*order in which they come.*sorted"):
        load_as_built(State(pool=pool))
    assert type(pool.unlabelled) is set


@pytest.mark.parametrize("listed", [sorted, len, lambda them: {"sum": sum(them)}])
def test_a_set_whose_order_no_state_dict_gives_is_left_alone(listed):
    pool = Pool(listed)
    pool.load_state_dict = lambda saved: None
    state = State(pool=pool)
    load_as_built(state)
    load_own_again(state)


def test_a_set_that_has_another_order_after_a_load_is_told_as_such():
    pool = Pool(list)
    pool.query([each for each in range(150) if each not in (9, 16)])  # 16 comes first in a small set
    again = Pool(list)
    state = State(pool=pool)
    flat = copy.deepcopy(state.flatten())
    with pytest.raises(
        StateDoesNotFit, match=r"pool\.unlabelled: the same elements in another order.*sorted"
    ):
        State(pool=again).load(flat)
