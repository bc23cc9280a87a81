"""What a step's functions read beside the State is the same in every generation, or refused."""

import copy
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import UsageError
from elastic.train.frozen_inputs import FrozenInputs
from elastic.train.state import State
from elastic.train.values import Values

STEPS = 6
ALONE = SimpleNamespace(rank=0, world_size=1, all_gather=lambda mine: [mine])
X = torch.ones(2, 3)


@dataclass
class Step:
    number: int
    frozen: FrozenInputs
    groups: SimpleNamespace

    @property
    def epoch(self):
        return (self.number - 1) // 2

    def mean_loss(self, function):
        self.frozen.look(self.number, function, sys._getframe())
        function(X)
        self.frozen.compare_ranks(self.number, self.groups)


class Generation:
    """A process that begins at a step with what stands beside the state before it.

    saved: what stands beside the state of each step. pid: None where no number is a process's own.
    """

    def __init__(self, first=1, there=None, last=STEPS, numbers=None, groups=ALONE, pid=None):
        self.first, self.there, self.last = first, there or {}, last
        self.numbers = numbers or {}
        self.saved, self.groups = {}, groups
        self.own = frozenset() if pid is None else frozenset({pid, groups.world_size, groups.rank})

    def steps(self, **objects):
        frozen = FrozenInputs(State(**objects), [], "NEW_RUN")
        frozen.resume(self.there, self.numbers)
        frozen.begin(self.first, sys._getframe(), self.own)
        for number in range(self.first, self.last + 1):
            yield Step(number, frozen, self.groups)
            self.saved[number] = frozen.saved()
            self.numbers = frozen.numbers()


class Logging(nn.Module):
    """Each call leaves a new tensor, here always in the memory of the one before."""

    def __init__(self, numbers, logged):
        super().__init__()
        self.numbers, self.memory, self.logged = iter(numbers), torch.tensor(0.0), dict(logged)

    def loss(self, x):
        self.memory.data.fill_(next(self.numbers))
        self.logged["acc"] = self.memory.detach()
        return x


def logs(run, numbers, logged):
    model = Logging(numbers, logged)
    for step in run.steps(model=model):
        step.mean_loss(model.loss)


@pytest.mark.parametrize("is_there_before", [True, False])
def test_what_each_call_leaves_behind_is_the_same_beside_the_state_on_every_rank(is_there_before):
    """An accuracy of a few samples is the same in two steps on one rank and not on the other. Only
    on that one it looked like a constant, and the run ended since the ranks' states differed.
    """
    logged, found = ({"acc": torch.tensor(0.5)} if is_there_before else {}), []
    for numbers in ([0.5] * STEPS, [0.5, 0.25, 0.0, 0.5, 0.0, 0.5]):
        logs(run := Generation(), numbers, logged)
        found.append({name: each for name, each in run.saved[STEPS].items() if "acc" in name})
    assert found[0] == found[1]


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 3).requires_grad_(False)


def in_the_loop(run, seed):
    model, teacher = linear(0), nn.Sequential(linear(seed), nn.BatchNorm1d(3)).eval()
    for step in run.steps(model=model):
        step.mean_loss(lambda x: model(x) - teacher(x))


def distil(student, teacher):
    return lambda x: student(x) - teacher(x)


def from_a_factory(run, seed):
    model = linear(0)
    loss = distil(model, linear(seed))
    for step in run.steps(model=model):
        step.mean_loss(loss)


def by_partial(run, seed):
    model, teacher = linear(0), linear(seed)
    loss = partial(lambda student, teacher, x: student(x) - teacher(x), model, teacher)
    for step in run.steps(model=model):
        step.mean_loss(loss)


def by_a_helper(run, seed):
    model, teacher = linear(0), linear(seed)

    def train(step, student, frozen):
        step.mean_loss(lambda x: student(x) - frozen(x))

    for step in run.steps(model=model):
        train(step, model, teacher)


class Trainer:
    def __init__(self, seed):
        self.model = linear(0)
        self.load(seed)

    def load(self, seed):
        self.teacher = linear(seed)

    def loss(self, x):
        return self.model(x) - self.teacher(x)

    def train(self, run):
        for step in run.steps(model=self.model):
            step.mean_loss(self.loss)


def by_a_trainer(run, seed):
    Trainer(seed).train(run)


class Distillation(nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, x):
        return self.student(x) - self.teacher(x)


def by_a_module(run, seed):
    model = linear(0)
    loss = Distillation(model, linear(seed))
    for step in run.steps(model=model):
        step.mean_loss(loss)


MODULES = [in_the_loop, from_a_factory, by_partial, by_a_helper, by_a_trainer, by_a_module]


@pytest.mark.parametrize("recipe", MODULES)
def test_another_teacher_in_a_later_generation_is_refused_by_name_wherever_it_begins(recipe):
    """The first generation had one teacher, the next one another, as of a file that was overwritten
    meanwhile; also after a single step.
    """
    calm = Generation()
    recipe(calm, 1)
    for step in range(1, STEPS):
        recipe(Generation(step + 1, calm.saved[step]), 1)
        with pytest.raises(
            UsageError, match=rf"step {step + 1}: [a-z.]*(teacher|frozen)[a-z0-9.]*weight has other"
        ):
            recipe(Generation(step + 1, calm.saved[step]), 2)


def tensor(run, seed):
    model, prior = linear(0), linear(seed).weight.detach().clone()
    for step in run.steps(model=model):
        step.mean_loss(lambda x: model(x) - x @ prior)


def array(run, seed):
    model, prior = linear(0), np.arange(3) + seed
    for step in run.steps(model=model):
        step.mean_loss(lambda x: model(x) - torch.from_numpy(prior))


def attribute(run, seed):
    model = Distillation(linear(0), nn.Identity())
    model.prior = torch.full((3,), float(seed))
    for step in run.steps(model=model):
        step.mean_loss(lambda x: model(x) - model.prior)


@pytest.mark.parametrize("recipe", [tensor, array, attribute])
def test_another_tensor_is_refused_where_two_steps_showed_that_it_is_constant(recipe):
    calm = Generation()
    recipe(calm, 1)
    assert calm.saved[1] == {}
    with pytest.raises(UsageError, match=r"prior has other contents than when this run first read it"):
        recipe(Generation(3, calm.saved[2]), 2)


def a_copy_of_each_step(run, _seed):
    model = linear(0)
    for step in run.steps(model=model):
        with torch.no_grad():
            model.weight += step.number
        old = copy.deepcopy(model)
        step.mean_loss(lambda x: model(x) - old(x))  # noqa: B023 - called at once


def a_copy_of_each_step_in_a_helper(run, _seed):
    model = linear(0)

    def train(step):
        old, noise = copy.deepcopy(model), torch.full((3,), float(step.number))
        step.mean_loss(lambda x: model(x) - old(x) + noise)

    for step in run.steps(model=model):
        with torch.no_grad():
            model.weight += step.number
        train(step)


def one_of_several_by_epoch(run, _seed):
    model, teachers = linear(0), [linear(seed) for seed in range(3)]
    teacher = teachers[0]
    for step in run.steps(model=model):
        if step.epoch:
            teacher = teachers[step.epoch]
        step.mean_loss(lambda x: model(x) - teacher(x))  # noqa: B023 - called at once


def one_of_several_losses(run, _seed):
    model = linear(0)
    losses = [distil(model, linear(seed)) for seed in range(3)]
    for step in run.steps(model=model):
        step.mean_loss(losses[step.epoch])


class Switching(Trainer):
    def begin(self, step):
        self.teacher = linear(step.epoch)

    def train(self, run):
        for step in run.steps(model=self.model):
            self.begin_all(step)
            step.mean_loss(self.loss)

    def begin_all(self, step):
        self.begin(step)


def an_attribute_of_each_epoch(run, _seed):
    Switching(1).train(run)


def what_the_step_sets(run, _seed):
    model, temperature, weights = linear(0), torch.ones(1), np.ones(3)
    for step in run.steps(model=model):
        temperature.fill_(step.number)
        weights[:] = step.number
        step.mean_loss(lambda x: model(x) * temperature * torch.from_numpy(weights))


def outputs_and_caches(run, _seed):
    model, teacher, kept, cache = linear(0), linear(1), {}, {}
    teacher.register_forward_hook(lambda _module, _x, y: kept.update(y=y))
    for step in run.steps(model=model):

        def loss(x, number=step.number):
            teacher.last = x * number
            return model(x) - teacher(x) * cache.setdefault(len(x), torch.ones(1)) * len(kept)

        step.mean_loss(loss)
        if step.number % 2:
            cache.clear()


def what_the_state_saves(run, seed):
    model, values = linear(seed), Values(mean=torch.full((3,), float(seed)))
    slow, rows = Distillation(model, linear(seed)), {"first": model.weight[0], "all": [model.weight.view(-1)]}
    for step in run.steps(model=model, slow=slow, values=values):
        step.mean_loss(lambda x: model(x) - slow(x) + values.mean + rows["first"] + rows["all"][0][0])


HARMLESS = [
    a_copy_of_each_step,
    a_copy_of_each_step_in_a_helper,
    one_of_several_by_epoch,
    one_of_several_losses,
    an_attribute_of_each_epoch,
    what_the_step_sets,
    outputs_and_caches,
    what_the_state_saves,
]


@pytest.mark.parametrize("recipe", HARMLESS)
def test_what_each_step_makes_or_the_state_saves_may_be_another_one_at_every_resume(recipe):
    """A process may begin at any step, and with other contents of what the State saves."""
    calm = Generation()
    recipe(calm, 1)
    for step in range(1, STEPS):
        recipe(Generation(step + 1, calm.saved[step], last=STEPS), 2)


def test_ranks_compare_what_they_read_in_their_first_step():
    """Rank 1 found a file that rank 0 had not written yet."""
    ranks = [Generation(last=1), Generation(last=1)]
    for rank, seed in enumerate((1, 2)):
        in_the_loop(ranks[rank], seed)
    groups = SimpleNamespace(rank=0, all_gather=lambda _mine: [(each.saved[1], ({}, [])) for each in ranks])
    frozen = FrozenInputs(State(model=linear(0)), [], "NEW_RUN")
    frozen.begin(3, None)
    frozen.compare_ranks(4, groups)
    with pytest.raises(
        UsageError, match=r"step 3: teacher\.0\.bias, .* another one on rank 1 than on rank 0"
    ):
        frozen.compare_ranks(3, groups)


@pytest.mark.parametrize("layers", [*range(1, 12), 20])
def test_a_large_module_has_few_names_and_each_change_in_it_counts(layers):
    """Of any number of tensors, odd ones as well."""

    def recipe(run, *, changed=None):
        model, teacher = linear(0), nn.Sequential(*[linear(seed) for seed in range(layers)])
        teacher.register_buffer("scale", torch.ones(1))
        if changed is not None:
            teacher[changed].weight[0, 0] += 1
        for step in run.steps(model=model):
            step.mean_loss(lambda x: model(x) - teacher(x))

    calm = Generation()
    recipe(calm)
    assert len(calm.saved[1]) <= 8
    for changed in range(layers):
        with pytest.raises(UsageError, match="teacher"):
            recipe(Generation(2, calm.saved[1]), changed=changed)


def test_a_tensor_that_the_loop_leaves_behind_at_an_epochs_end_is_no_frozen_input():
    """`self.log` of a trainer: a metric of this rank's last shard, which stays for some steps. A
    process that resumes before the end of an epoch took it for a constant, and the ranks differed.
    """
    run, metrics = Generation(first=2), {}
    model = linear(0)
    for step in run.steps(model=model):
        step.mean_loss(lambda x: model(x) * len(metrics))
        if step.number == 2:
            metrics["train_loss"] = torch.tensor(float(run.first))
    assert not any("train_loss" in name for name in run.saved[STEPS])
