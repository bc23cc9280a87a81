"""Gradients that a recipe makes itself from sums over shards are exact, and misuses are refused."""

import copy

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
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


def squares(net):
    return lambda batch: net(batch.data[0]).square().sum()


@pytest.mark.parametrize("update", [True, False])
def test_a_sum_whose_backward_was_forgotten_ends_no_step(update):
    """`loss.backward()` in place of `step.backward(loss)` would train nothing."""
    net, optimizer, coming = recipe()
    step = next(coming)
    step.sum(squares(net)).backward()
    if update:
        optimizer.step()
    with pytest.raises(
        UsageError, match=r"return them with \.detach\(\) from the function given to step\.sum"
    ):
        step.end_by_hand()


@pytest.mark.parametrize("between", ["mean_loss", "backward", "step"])
def test_a_sum_that_a_later_computation_has_ended_is_refused_in_a_loss(between):
    """It was a KeyError, or a gradient that went nowhere."""
    net, optimizer, coming = recipe()
    step = next(coming)
    total = step.sum(squares(net))
    if between == "mean_loss":
        step.mean_loss(squares(net))
    else:
        step.backward(total)
    optimizer.step()
    if between == "step":
        step = next(coming)
    other = step.sum(squares(net))
    with pytest.raises(UsageError, match=r"a loss uses the result of a step\.sum of step 1 after a later"):
        step.backward(total + other)
