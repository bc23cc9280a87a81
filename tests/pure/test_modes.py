"""What a function does to the mode of modules is the same for every shard of a pass."""

import copy

import pytest
import torch
from audited import Training
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn.functional import cross_entropy

from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

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
