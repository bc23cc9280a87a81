"""Real objects of training are put together exactly, and go on as if they had never been
interrupted.
"""

from functools import partial

import pytest
import torch
from saved_state import saved
from torch import nn
from torch.optim import lr_scheduler

from elastic.errors import StateDoesNotFit
from elastic.snapshot import image
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def tied():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    net[3].weight = net[0].weight
    return net


class Average:
    """An average that a recipe keeps by itself, from the state of its module."""

    def __init__(self, net):
        self.net = net

    def state_dict(self):
        return {"net": self.net.state_dict(), "steps": 3}

    def load_state_dict(self, state_dict):
        self.net.load_state_dict(state_dict["net"])


def test_the_state_of_a_module_inside_another_object_loads():
    """With the versions of its layers: without them a layer would take it for one of its oldest."""
    kept = saved(State(ema=Average(tied())))
    other = State(ema=Average(nn.Sequential(*(each.requires_grad_(False) for each in tied()))))
    other.load(kept)
    assert checksum_of(other.flatten()) == checksum_of(kept)


def test_tied_weights_are_kept_once_and_stay_tied():
    """The image has the bytes once; the second name refers to the first one."""
    net = tied()
    parts = State(net=net).flatten()
    assert b'net.3.weight":{' not in image.layout(parts.tensors, None).head
    other = tied()
    State(net=other).load(saved(State(net=net)))
    assert other[3].weight is other[0].weight
    assert torch.equal(other[3].weight, net[0].weight)


OPTIMIZERS = {
    "SGD": {"momentum": 0.9},  # strides
    "AdamW": {"amsgrad": True},
    "NAdam": {},  # dtypes
    "ASGD": {"t0": 1.0},
    "Adafactor": {},  # shapes
    "LBFGS": {"max_iter": 2},  # lists
}


def fitted(name, dtype):
    """A net with channels_last weights, where the optimizer takes them, and a step of it."""
    torch.manual_seed(0)
    if name == "LBFGS":
        net = nn.Sequential(nn.Linear(6, 6, bias=False)).to(dtype)
    else:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)).to(
            dtype, memory_format=torch.channels_last
        )
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, **OPTIMIZERS[name])

    def step(number):
        draw = torch.Generator().manual_seed(number)
        inputs = torch.randn((2, 3, 6, 6), generator=draw).to(dtype)

        def closure():
            optimizer.zero_grad()
            loss = net(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return State(net=net, optimizer=optimizer), step


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_an_optimizer_goes_on_exactly_in_every_dtype(name, dtype):
    """NAdam and ASGD keep float32 numbers beside bfloat16 and float64 parameters, to which their
    load_state_dict rounds them. The weights are channels_last: momenta that came back row-major
    could round otherwise.
    """
    state, step = fitted(name, dtype)
    for number in range(3):
        step(number)
    kept = saved(state)
    other, other_step = fitted(name, dtype)
    other.load(kept)
    expected, found = state.flatten().tensors, other.flatten().tensors
    assert {entry: (each.dtype, each.stride()) for entry, each in found.items()} == {
        entry: (each.dtype, each.stride()) for entry, each in expected.items()
    }
    for number in range(3, 5):
        step(number), other_step(number)
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())


class Running(nn.Module):
    """A module whose forward gave its buffer other strides than it was built with."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 3))


def test_a_buffer_comes_back_with_the_strides_of_training():
    """A product with it may round otherwise if it is row-major again."""
    net, other = Running(), Running()
    net.mean = torch.arange(6.0).view(3, 2).t()
    State(net=other).load(saved(State(net=net)))
    assert other.mean.stride() == (1, 2) and torch.equal(other.mean, net.mean)


def test_a_view_is_not_torn_from_its_memory():
    """The row-major tensor of the save would have to replace one of two that share memory."""
    net, other = Running(), Running()
    net.mean = torch.arange(6.0).view(3, 2).t()
    other.whole = torch.zeros(4, 3)
    other.mean = other.whole[:2]
    with pytest.raises(StateDoesNotFit, match=r"net\.mean: saved .* strides \(1, 2\); now .* row-major"):
        State(net=other).load(saved(State(net=net)))


STEPS, LOADED_AFTER = 12, 5


def chained(optimizer):
    """Two schedulers, each of which has a part in the rate."""
    both = [
        lr_scheduler.LinearLR(optimizer, total_iters=4),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    return lr_scheduler.SequentialLR(optimizer, both, milestones=[5])


MADE = {
    "a function": partial(lr_scheduler.LambdaLR, lr_lambda=lambda count: 0.9**count),
    "a Counter": partial(lr_scheduler.MultiStepLR, milestones=[1, 5, 6, 7]),
    "schedulers inside": chained,
    "an infinity": partial(lr_scheduler.ReduceLROnPlateau, patience=1, cooldown=1),
    "a function of its own": partial(
        lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=4, mode="exp_range"
    ),
    "settings in the groups": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=STEPS),
}


def scheduled(name):
    """The state, and a step of it, which gives the rate that the step was made with."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = MADE[name](optimizer)

    def step(number):
        optimizer.zero_grad()
        net(torch.full((2, 3), 1 / number)).square().mean().backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step(*[1.0] * (name == "an infinity"))
        return float(rate).hex()

    return State(net=net, optimizer=optimizer, scheduler=scheduler), step


@pytest.mark.parametrize("name", MADE)
def test_a_scheduler_goes_on_exactly(name):
    """It is saved where one of a sequence hands over to the next, and loaded into objects that went
    elsewhere first: what is not in its state_dict would show in the next rates.
    """
    state, step = scheduled(name)
    for number in range(1, LOADED_AFTER + 1):
        step(number)
    kept = saved(state)
    other, other_step = scheduled(name)
    other_step(1)
    other.load(kept)
    later = range(LOADED_AFTER + 1, STEPS + 1)
    rates = [step(number) for number in later]
    assert [other_step(number) for number in later] == rates
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())
    assert len(set(rates)) > 1
