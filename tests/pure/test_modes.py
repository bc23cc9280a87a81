"""What a function does to the mode of modules is the same for every shard of a pass."""

import copy

import pytest
import torch
from audited import Training
from hypothesis import given
from hypothesis import strategies as st
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn.functional import cross_entropy

from elastic.errors import UsageError
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State
from elastic.train.step.modes import Modes, are_equal

FORMS = "one mean", "one sum", "two sums", "eval between sums"


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    )


def robust(net):
    """As TRADES is written: the loss in training mode, the clean outputs in evaluation mode."""

    def loss(batch):
        inputs, labels = batch.data
        outputs = net(inputs)
        net.eval()
        with torch.no_grad():
            clean = net(inputs)
        return cross_entropy(outputs, labels) + (net(inputs + 0.1) - clean).square().mean()

    return loss


def computed(step, net, form):
    """With as many passes as the form has. Only some steps begin in training mode."""
    net.train(step.number != 3)
    if form == "one mean":
        step.mean_loss(robust(net))
        return
    total = step.sum(robust(net))
    assert not net.training
    if form != "one sum":
        net.train(form == "two sums")
        total = total + step.sum(lambda batch: net.train()(batch.data[0]).square().mean())
        assert net.training
    if form == "eval between sums":
        net.eval()
    step.backward(total / step.shards)


def train(member, form, audits):
    torch.set_num_threads(1)
    net = network()
    objects = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    training = Training(member, objects, audits=audits)
    for step in training.steps():
        computed(step, net, form)
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
    return [checksum_of(State(**objects).flatten()).whole, [module.training for module in net.modules()]]


@pytest.mark.parametrize("form", FORMS)
def test_every_world_has_the_bits_of_one_where_a_function_leaves_evaluation_mode(ranks, form):
    """`model.eval()` in the function: only the first shard of each rank would have dropout."""
    expected = train(ALONE, form, False)
    for world_size, audits in ((1, True), (2, False), (3, True)):
        assert ranks.run(world_size, train, form, audits) == [expected] * world_size


def test_each_shard_begins_in_the_mode_that_the_pass_began_with():
    """Against plain PyTorch: one call with a fresh copy of the model for each shard."""
    net = network()
    net[3].p = 0.0
    for step in steps(ALONE, State(net=net)):
        net.train()
        alone = [copy.deepcopy(net) for _ in range(step.shards)]
        expected = []

        def both(batch, alone=alone, expected=expected):
            model = alone[batch.shard]
            loss = robust(model)(batch) / len(alone)
            expected.append(torch.autograd.grad(loss, list(model.parameters())))
            return robust(net)(batch)

        step.mean_loss(both)
        assert not net.training
        for parameter, *gradients in zip(net.parameters(), *expected, strict=True):
            torch.testing.assert_close(parameter.grad, torch.stack(gradients).sum(0))


def test_modes_are_put_back_for_each_module_alone():
    """A recipe's `train` may keep a part in evaluation mode, so it is not called."""

    class Frozen(nn.Linear):
        def train(self, _mode=True):
            raise AssertionError("the modes of this module were set by its method")

    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    net[0].training = False
    net.append(Frozen(2, 2))
    modes = Modes.of(list(net.modules()))
    for module in net.modules():
        module.training = not module.training
    modes.load()
    assert [module.training for module in net.modules()] == [True, False, True, True]


def test_a_mode_that_a_class_computes_is_put_back_by_its_property():
    class Computed(nn.Module):
        @property
        def training(self):
            return self.mode

        @training.setter
        def training(self, mode):
            object.__setattr__(self, "mode", mode)

    module = Computed()
    modes = Modes.of([module])
    module.training = False
    modes.load()
    assert module.training


def left_by_labels(net, form):
    def loss(batch):
        inputs, labels = batch.data
        outputs = net(inputs)
        if int(labels.sum()) % 2:
            net[3].eval()
        return cross_entropy(outputs, labels)

    def computed(step):
        if form == "one mean":
            step.mean_loss(loss)
        else:
            step.sum(lambda batch: net(batch.data[0]).mean())
            step.backward(step.sum(loss))

    return computed


def refused_with(member, form, shards):
    torch.set_num_threads(1)
    net = network()
    computed = left_by_labels(net, form)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    updates = 0
    try:
        for step in steps(member, State(net=net, optimizer=optimizer), shards=shards):
            net.train()
            computed(step)
            optimizer.step()
            updates += 1
    except UsageError as error:
        return [updates, str(error)]
    return [updates, ""]


@pytest.mark.parametrize("form", ["one mean", "two sums"])
@pytest.mark.parametrize("shards", [2, 8])
def test_modes_that_depend_on_the_shard_are_refused_with_the_module_at_every_world_size(ranks, form, shards):
    """With as many workers as shards, no worker sees two shards: the sum of a step tells it."""
    expected = [updates, text] = refused_with(ALONE, form, shards)
    assert text.startswith(f"step {updates + 1}: ")
    assert "found net.3 in evaluation mode after some shards" in text
    for world_size in (1, 2, min(3, shards)):
        assert ranks.run(world_size, refused_with, form, shards) == [expected] * world_size


def test_modes_that_each_worker_sets_otherwise_are_refused(ranks):
    """`if run.is_first: net.eval()` in the function: each worker's shards agree with each other."""
    for updates, text in ranks.run(2, refused_by_rank):
        assert updates == 0
        assert "found net in evaluation mode after some shards" in text


def refused_by_rank(member):
    torch.set_num_threads(1)
    net = network()
    for step in steps(member, State(net=net)):
        try:
            step.mean_loss(
                lambda batch: cross_entropy(net.train(member.rank == 0)(batch.data[0]), batch.data[1])
            )
        except UsageError as error:
            return [step.number - 1, str(error)]
    return None


def test_a_worker_with_more_modules_than_another_is_refused_too(ranks):
    """Flags of other numbers of modules cannot be added: no name is given."""
    for text in ranks.run(2, refused_by_structure):
        assert "found a module in evaluation mode after some shards" in text


def refused_by_structure(member):
    torch.set_num_threads(1)
    net = network()
    if member.rank:
        net.append(nn.Identity())
    for step in steps(member, State(net=net)):
        try:
            step.mean_loss(lambda batch: cross_entropy(net(batch.data[0]), batch.data[1]))
        except UsageError as error:
            return str(error)
    return None


@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=64))
def test_sums_tell_whether_all_numbers_are_equal(numbers):
    sums = sum(map(float, numbers)), sum(float(each * each) for each in numbers)
    assert are_equal(sums, len(numbers)) == (len(set(numbers)) == 1)
