"""Every learning rate scheduler of torch goes on after a load as if never interrupted."""

import inspect
from functools import partial

import pytest
import torch
from saved_state import saved
from torch import nn
from torch.optim import lr_scheduler

from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

STEPS, LOADED_AFTER = 12, 5


def chained(optimizer, kind, **options):
    """Two schedulers, each of which has a part in the rate."""
    both = [
        lr_scheduler.LinearLR(optimizer, total_iters=4),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    return kind(optimizer, both, **options) if options else kind(both)


MADE = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda count: 0.9**count),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda count: 1 - 0.01 * count),
    "StepLR": partial(lr_scheduler.StepLR, step_size=3),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 5, 6, 7]),
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=7),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=7),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "SequentialLR": partial(chained, kind=lr_scheduler.SequentialLR, milestones=[5]),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=9, power=2.0),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=9),
    "ChainedScheduler": partial(chained, kind=lr_scheduler.ChainedScheduler),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1, cooldown=1),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=4, mode="exp_range"),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=STEPS),
}


def training(name):
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
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        return float(rate).hex()

    return State(net=net, optimizer=optimizer, scheduler=scheduler), step


@pytest.mark.parametrize("name", MADE)
def test_every_scheduler_goes_on_exactly(name):
    """It is saved where one of a sequence hands over to the next, and loaded into objects that went
    elsewhere first: what is not in its state_dict would show in the next rates.
    """
    state, step = training(name)
    for number in range(1, LOADED_AFTER + 1):
        step(number)
    kept = saved(state)
    other, other_step = training(name)
    other_step(1)
    other.load(kept)
    later = range(LOADED_AFTER + 1, STEPS + 1)
    rates = [step(number) for number in later]
    assert [other_step(number) for number in later] == rates
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())
    assert len(set(rates)) > 1


def test_no_scheduler_of_torch_is_left_out():
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind)
        and issubclass(kind, lr_scheduler.LRScheduler)
        and not name.endswith("LRScheduler")
    }
    assert kinds == set(MADE)
