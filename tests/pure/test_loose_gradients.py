"""Parameters that no optimizer of torch holds: their gradients are those of plain PyTorch."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


class Lion:
    """An optimizer that derives from nothing and that no State holds."""

    def __init__(self, parameters, how):
        self.parameters, self.how = list(parameters), how

    def step(self):
        for p in self.parameters:
            match self.how:
                case "data":
                    p.data -= 0.1 * p.grad.sign()
                case "no_grad":
                    with torch.no_grad():
                        p.sub_(0.1 * p.grad.sign())
                case "assigned":
                    p.data = p.data - 0.1 * p.grad.sign()


def trains(member, how, form, beside):
    """The state and the bits of each step's norm over all parameters.

    beside: an optimizer of torch holds the last layer.
    """
    net, average = layers(), layers()
    own = Lion(net[0].parameters() if beside else net.parameters(), how)
    objects = {"net": net, "average": average}
    if beside:
        objects["optimizer"] = torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9)
    norms, state = [], State(**objects)
    for step in steps(member, state):
        assert [p.grad for p in net.parameters()] == [None] * 4
        if form == "sum":
            penalty = 1e-3 * net[0].weight.square().sum()
            step.backward(step.sum(loss_of(net)) / step.shards + penalty)
        else:
            step.mean_loss(loss_of(net))
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item().hex())
        own.step()
        if beside:
            objects["optimizer"].step()
        assert [p.grad for p in average.parameters()] == [None] * 4
    return [checksum_of(state.flatten()).whole, norms]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("how", "form"), [("data", "mean"), ("no_grad", "sum"), ("assigned", "mean")])
def test_an_optimizer_of_the_recipes_own_gets_the_sum_of_all_shards(ranks, how, form, beside):
    """Beside one of torch, and unknown to the State. The first computation of a process does not
    know yet which of the parameters a backward reaches; the bits are those of all later ones.
    """
    alone = ranks.run(1, trains, how, form, beside)
    for world_size in (2, 3):
        assert ranks.run(world_size, trains, how, form, beside) == alone * world_size


def gradients(member, used, frozen):
    """In each step, the bits of all gradients. used: whether an optimizer holds the first layer."""
    net = layers()
    net[0].bias.requires_grad_(not frozen)
    held = net.parameters() if used else net[2].parameters()
    optimizer = torch.optim.SGD(held, lr=0.0)
    found = []
    for step in steps(member, State(net=net, optimizer=optimizer)):
        # A layer that only some shards use, on whichever rank.
        step.mean_loss(
            lambda batch: F.cross_entropy(
                net[2](net[:2](batch.data[0]) if batch.shard == 5 else torch.ones(len(batch.data[0]), 8)),
                batch.data[1],
            )
        )
        found.append(
            [None if p.grad is None else p.grad.view(torch.int32).sum().item() for p in net.parameters()]
        )
        optimizer.step()
    return found


def test_a_gradient_has_the_same_bits_whether_or_not_an_optimizer_holds_its_parameter(ranks):
    for frozen in (False, True):
        expected = ranks.run(1, gradients, True, frozen)
        for world_size in (1, 2, 3):
            assert ranks.run(world_size, gradients, False, frozen) == expected * world_size


def test_a_second_computation_of_a_step_adds_and_a_step_begins_with_none():
    """As a second backward in plain PyTorch. What is there before the loop is in no state."""
    net = layers()
    net(torch.ones(2, FEATURES)).sum().backward()
    for step in steps(ALONE, State(net=net)):
        assert [p.grad for p in net.parameters()] == [None] * 4
        step.mean_loss(loss_of(net))
        once = [p.grad.clone() for p in net.parameters()]
        kept = net[0].weight.grad
        step.mean_loss(loss_of(net))
        for p, gradient in zip(net.parameters(), once, strict=True):
            assert torch.equal(p.grad, 2 * gradient)
        assert torch.equal(kept, once[0])
