"""Gradients that a recipe makes itself from sums over shards are exact."""

import copy

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

NORM, SHARDS = 1.0, 8


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def clipped(net, batch):
    """The gradients of all samples of a shard, each clipped to NORM, added up and flat: [P]."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(values, x, y):
        return F.cross_entropy(torch.func.functional_call(net, values, (x[None],)), y[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, *batch.data)
    flat = torch.cat([gradient.flatten(1) for gradient in found.values()], 1)
    return (flat * (NORM / flat.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


def set_gradients(net, flat):
    nn.utils.vector_to_parameters(flat, (shadow := copy.deepcopy(net)).parameters())
    for parameter, value in zip(net.parameters(), shadow.parameters(), strict=True):
        parameter.grad = value.detach()


class OwnUpdate:
    """An optimizer without torch's hooks: the step ends with its body."""

    def __init__(self, net):
        self.net = net

    def step(self):
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.sub_(0.1 * parameter.grad)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def private(member, kind):
    """DP-SGD: clipped gradients of single samples, with noise from the step's own stream."""
    net = net_of()
    optimizer = OwnUpdate(net) if kind == "own" else torch.optim.Adam(net.parameters(), lr=0.05)
    state = State(net=net, optimizer=optimizer)
    norms = []
    for step in steps(member, state):
        if kind == "mixed" and step.number % 2:
            step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        else:
            total = step.sum(lambda batch: clipped(net, batch))
            assert not total.requires_grad
            set_gradients(net, (total + 0.1 * torch.randn(len(total))) / step.global_batch)
        optimizer.step()
        if kind == "own":
            step.end_by_hand()  # as the loop does after the body
        norms += [number.hex() for number in step.outcome.losses]
    return [checksum_of(state.flatten()).whole, norms]


@pytest.mark.parametrize("kind", ["torch", "own", "mixed"])
def test_gradients_by_hand_from_a_sum_are_exact_at_every_world_size(ranks, kind):
    """Differential privacy: per-sample gradients are clipped, summed, and noise is added."""
    (alone,) = ranks.run(1, private, kind)
    assert len(alone[1]) >= 4
    for world_size in (2, 3):
        assert ranks.run(world_size, private, kind) == [alone] * world_size


def recipe():
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, steps(ALONE, State(net=net, optimizer=optimizer))
