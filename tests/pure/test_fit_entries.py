"""What objects take of another run's state: attacks on what would replace the recipe unseen."""

import copy
import math

import pytest
import torch
from saved_state import Holder
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR, StepLR

from elastic.train.state.flat import checksum_of
from elastic.train.state.inherit import load_entries
from elastic.train.state.state import State


def net(seed, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def kept(state):
    """As a checkpoint holds it: later training does not change it."""
    return copy.deepcopy(state.flatten())


def parent(make):
    """A trained parent's state."""
    objects = make(net(0))
    torch.manual_seed(5)
    for _ in range(3):
        objects["optimizer"].zero_grad()
        objects["model"](torch.randn(8, 3)).square().mean().backward()
        objects["optimizer"].step()
        if "scheduler" in objects:
            objects["scheduler"].step()
    return kept(State(**objects))


def optimized(make):
    return lambda model: {"model": model, "optimizer": make(model)}


def adam(lr=0.1, **more):
    return optimized(lambda model: AdamW(model.parameters(), lr=lr, **more))


def scheduled(build):
    def objects(model):
        optimizer = AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": build(optimizer)}

    return objects


def test_hyperparameters_are_the_recipes_and_moments_the_parents():
    """A user lowers the rate to finetune. A saved one that came back would undo that unseen."""
    saved = parent(adam())
    state = State(**adam(lr=0.001, weight_decay=0.5)(net(1)))
    assert load_entries(saved, state, ()) == ([], [])
    (group,) = state.objects["optimizer"].param_groups
    assert (group["lr"], group["weight_decay"]) == (0.001, 0.5)
    moments = state.flatten().tensors
    assert torch.equal(moments["optimizer.state.0.exp_avg"], saved.tensors["optimizer.state.0.exp_avg"])
    assert moments["optimizer.state.0.step"] == 3


@pytest.mark.parametrize(
    "make",
    [
        adam(),
        scheduled(lambda o: CosineAnnealingLR(o, T_max=10)),
        scheduled(lambda o: OneCycleLR(o, max_lr=1.0, total_steps=9)),
    ],
    ids=["no schedule", "rate", "rate and betas"],
)
def test_the_same_recipe_takes_the_whole_state(make):
    """Every bit: weights, averages, moments, counts; and a schedule's rate does not jump back."""
    saved, state = parent(make), State(**make(net(1)))
    assert load_entries(saved, state, ()) == ([], [])
    assert checksum_of(state.flatten()) == checksum_of(saved)


def cosine(steps):
    return scheduled(lambda o: CosineAnnealingLR(o, T_max=steps))


def in_turn(first):
    return scheduled(lambda o: SequentialLR(o, [StepLR(o, first), StepLR(o, 4)], milestones=[2]))


stepwise = scheduled(lambda o: StepLR(o, 5))
exponential = scheduled(lambda o: LambdaLR(o, lambda step: 0.9**step))


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        (cosine(10), cosine(20), "scheduler.T_max is 10 there and 20 here"),
        (stepwise, exponential, "scheduler.gamma is 0.1 there and None here"),
        (in_turn(3), in_turn(5), "scheduler[0].step_size is 3 there and 5 here"),
        (adam(), stepwise, "no entry scheduler there"),
        (adam(), lambda _: adam()(net(1, width=5)), "size mismatch for 0.weight"),
        (adam(), lambda model: adam()(model.double()), "the tensor model.0.bias: saved"),
        (adam(), optimized(lambda m: AdamW(m[0].parameters())), "match the size of optimizer's group"),
        (adam(), optimized(lambda m: AdamW([{"params": [p]} for p in m.parameters()])), "different number"),
        (adam(), optimized(lambda m: SGD(m.parameters())), "there and dampening, momentum, nesterov here"),
    ],
)
def test_what_does_not_fit_is_named(there, here, says):
    """One difference between two recipes at a time; none is taken for the other."""
    problems, _ = load_entries(parent(there), State(**here(net(1))), ())
    assert any(says in words for words in problems)


def own_optimizer(lr, steps=0):
    """Neither torch's nor built from it: nothing says which of its numbers are settings."""
    return Holder({"lr": lr, "steps": steps, "best": math.inf, "momenta": [torch.zeros(2)], "by": {0: "a"}})


def test_an_object_of_the_recipes_own_says_which_numbers_it_took():
    """A new rate has no effect there: the run must not go on without a word of it."""
    saved = kept(State(optimizer=own_optimizer(0.1, 24)))
    state = State(optimizer=own_optimizer(0.001))
    told = ["as it was saved: optimizer.lr 0.1, not 0.001; optimizer.steps 24, not 0"]
    assert load_entries(saved, state, ()) == ([], told)
    assert load_entries(saved, state, ()) == ([], [])
    problems, _ = load_entries(saved, State(**adam()(net(1))), ("optimizer",))  # torch's does not take it
    assert len(problems) == 1


def test_entries_not_named_stay_as_the_recipe_built_them():
    saved, state = parent(adam()), State(**adam()(net(1)))
    before = checksum_of(state.flatten()).entries
    assert load_entries(saved, state, ("model",)) == ([], [])
    after = checksum_of(state.flatten()).entries
    expected = checksum_of(saved).entries
    assert all(after[key] == expected[key] for key in after if key.startswith("model"))
    assert all(after[key] == before[key] for key in after if key.startswith("optimizer"))


def test_parameters_in_another_order_are_named():
    """A set of names that this process iterates otherwise; the two layers are of one shape."""

    def objects(order):
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        state = State(model=model, optimizer=SGD([model[number].weight for number in order], lr=0.1))
        state.begin()
        return state

    saved = kept(objects([0, 1]))
    problems, _ = load_entries(saved, objects([1, 0]), ())
    assert "expected model.0.weight in group 0, as there, found model.1.weight" in problems[0]
    assert load_entries(saved, objects([1, 0]), ("model",)) == ([], [])
