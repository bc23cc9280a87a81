"""Each parameter that is trained has one hook, also where the loop gives it another tensor."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn.functional import cross_entropy

from elastic.errors import UsageError
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def twice(net):
    """The second tensor may have the address of the first one, which nothing refers to any more."""
    for factor in (0.9, 1.1):
        torch.utils.swap_tensors(net[2].weight, nn.Parameter(net[2].weight.detach() * factor))


def with_each_other(net):
    torch.utils.swap_tensors(net[0].bias, net[2].bias)


SWAPS = twice, with_each_other


def train(member, index):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = State(net=net, optimizer=optimizer)
    for step in steps(member, state):
        step.mean_loss(lambda batch: cross_entropy(net(batch.data[0]), batch.data[1]))
        optimizer.step()
        if step.number == 1:
            SWAPS[index](net)
    return checksum_of(state.flatten()).whole


@pytest.mark.parametrize("index", range(len(SWAPS)), ids=[each.__name__ for each in SWAPS])
def test_a_parameter_whose_tensor_the_loop_swaps_is_trained_as_before(ranks, index):
    """Torch calls hooks from the tensor: the parameter lost the step's, and was trained no more.

    The numbers are those of plain PyTorch.
    """
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    plain = network()
    beside = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in steps(ALONE, State(net=net, optimizer=optimizer)):
        batches = []

        def loss(batch, batches=batches):
            batches.append(batch)
            return cross_entropy(net(batch.data[0]), batch.data[1])

        step.mean_loss(loss)
        optimizer.step()
        beside.zero_grad()
        for batch in batches:
            (cross_entropy(plain(batch.data[0]), batch.data[1]) / len(batches)).backward()
        beside.step()
        if step.number == 1:
            SWAPS[index](net)
            SWAPS[index](plain)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    expected = train(ALONE, index)
    assert ranks.run(2, train, index) == [expected] * 2


def halved(parameter):
    parameter.grad.mul_(0.5)


def set_between_sum_and_backward(net, step):
    total = step.sum(lambda batch: cross_entropy(net(batch.data[0]), batch.data[1]))
    if step.number == 2:
        net[2].weight.register_post_accumulate_grad_hook(halved)
    step.backward(total / step.shards)


def test_a_post_accumulate_hook_that_the_loop_sets_is_refused_in_that_step():
    """It would halve the first shard's gradient, and then that of two together, and so on: another
    result with each number of workers, and none after a restart.
    """
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps(ALONE, State(net=net, optimizer=optimizer)):
        if step.number == 2:
            with pytest.raises(UsageError, match=r"found a post-accumulate hook at net\.2\.weight"):
                set_between_sum_and_backward(net, step)
            return
        set_between_sum_and_backward(net, step)
        optimizer.step()
