"""A step gives the gradient that plain autograd gives for the whole batch, to each parameter its
own, and every draw, mode and buffer its place.
"""

import pytest
import torch
from steps import ALONE, BATCH, CLASSES, FEATURES, samples, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import Dataset

from elastic.train.state.state import State


def linear():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


def gradient(parameters):
    return torch.cat([p.grad.reshape(-1) for p in parameters])


def assert_close_to(found, expected):
    """Relative to the norm of the whole gradient; float32."""
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def whole_batch(step):
    indices = torch.cat([batch.indices for batch in step._batches])
    return tuple(part[indices] for part in samples().tensors)


def coupled_loss(outputs_sum, products):
    """Depends on every pair of samples, as Barlow Twins' loss does."""
    mean = outputs_sum / BATCH
    return (products / BATCH - torch.outer(mean, mean)).square().sum()


def test_a_coupled_losss_gradient_is_that_of_the_whole_batch():
    """Two sums in one step, both needed by the loss, and a penalty on the parameters; autograd does
    it all at once.
    """
    net = linear()
    step = next(steps(ALONE, State(net=net)))
    first = step.sum(lambda batch: net(batch.data[0]).sum(0))
    second = step.sum(lambda batch: net(batch.data[0]).T @ net(batch.data[0]))
    step.backward(coupled_loss(first, second) + 0.1 * net[0].weight.square().sum())
    found = gradient(net.parameters())
    net.zero_grad()
    outputs = net(whole_batch(step)[0])
    (coupled_loss(outputs.sum(0), outputs.T @ outputs) + 0.1 * net[0].weight.square().sum()).backward()
    assert_close_to(found, gradient(net.parameters()))


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_a_scaler_scales_the_gradient_and_not_the_loss(form):
    """A power of two is exact in binary: unscaled again, the gradient has the very bits of a run
    without scaler.
    """
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        net = linear()
        objects = {} if scaler is None else {"scaler": scaler}
        step = next(steps(ALONE, State(net=net, **objects)))
        if form == "mean":
            step.mean_loss(lambda batch, net=net: net(batch.data[0]).square().mean(), scaler)
        else:
            total = step.sum(lambda batch, net=net: net(batch.data[0]).square().sum())
            step.backward(total / BATCH + net[0].weight.square().sum(), scaler)
        found.append((gradient(net.parameters()), step.outcome.loss))
    (plain, plain_loss), (scaled, scaled_loss) = found
    assert torch.equal(scaled, plain * 2.0**10)
    assert scaled_loss == plain_loss


def test_every_shard_and_every_pass_has_draws_of_its_own():
    """Dropout masks that repeat over shards, sums or steps would be a key that lost a part."""
    net = linear()
    drawn = []

    def draw(batch):
        drawn.append(torch.rand(1).item())
        return net(batch.data[0]).sum()

    for step in steps(ALONE, State(net=net), shards=6, epochs=1):
        for _ in range(2):
            step.sum(draw)
    assert len(set(drawn)) == 24


def test_a_second_computation_adds_and_a_step_begins_with_none():
    """As a second backward in plain PyTorch. What is there before the loop is in no state."""
    net = linear()
    net(torch.ones(2, FEATURES)).sum().backward()
    for step in steps(ALONE, State(net=net)):
        assert [p.grad for p in net.parameters()] == [None] * 4
        step.mean_loss(loss_of(net))
        once = [p.grad.clone() for p in net.parameters()]
        step.mean_loss(loss_of(net))
        assert all(torch.equal(p.grad, 2 * one) for p, one in zip(net.parameters(), once, strict=True))


class Noisy(Dataset):
    """Its noise grows with the epoch that the loop sets, as in a curriculum."""

    def __init__(self):
        self.parts, self.strength = samples().tensors, 0.0

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, index):
        inputs, label = (part[index] for part in self.parts)
        return inputs + self.strength * torch.randn(inputs.shape), label


def test_what_the_body_sets_in_its_dataset_holds_in_that_step():
    """The batch of a step is loaded when the step first computes: a process that begins at this
    step, whose dataset is as the script made it, gets the same batch.
    """

    def batch_of_step(wanted, *, sets_all):
        dataset = Noisy()
        for step in steps(ALONE, State(net=linear()), dataset=dataset):
            if sets_all or step.number == wanted:
                dataset.strength = 0.1 * step.number
            batches = step._batches  # loaded and passed over, as in a step that is trained
            if step.number == wanted:
                return torch.cat([batch.data[0] for batch in batches])
        return None

    for number in (1, 2, 3, 4):
        expected = batch_of_step(number, sets_all=True)
        assert torch.equal(batch_of_step(number, sets_all=False), expected)
    assert not torch.equal(batch_of_step(3, sets_all=True), batch_of_step(4, sets_all=True))
