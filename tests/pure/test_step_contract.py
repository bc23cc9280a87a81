"""A step begins without the gradients that the step before has used, however it used them."""

import pytest
import torch
from steps import CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.train.state.state import State


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


def gradients_at_the_top(member, form):
    """Whether any parameter has a gradient, before each step's computation and after it."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    head = torch.optim.SGD(net[2].parameters(), lr=0.1)
    found = []
    for step in steps(member, State(net=net, optimizer=optimizer, head=head)):
        found.append([p.grad is not None for p in net.parameters()])
        if form == "sum":
            step.backward(step.sum(loss_of(net)))
        elif form == "by hand":
            totals = [step.sum(lambda _batch, p=p: torch.ones_like(p)) for p in net.parameters()]
            for p, total in zip(net.parameters(), totals, strict=True):
                p.grad = total
        else:
            step.mean_loss(loss_of(net))
        found.append([p.grad is not None for p in net.parameters()])
        if form == "in place":
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(0.1 * p.grad)
        elif form == "two optimizers":
            net[0].zero_grad()
            head.step()
        else:
            optimizer.step()
    return [any(each) for each in found]


@pytest.mark.parametrize("form", ["sum", "by hand", "in place", "two optimizers"])
def test_no_used_gradient_is_left_at_the_next_steps_beginning(ranks, form):
    """Such as for a norm that is logged there. A process that takes over has none: nor has any."""
    for world_size in (1, 2):
        assert ranks.run(world_size, gradients_at_the_top, form) == [[False, True] * 4] * world_size
