"""A step gives the gradient that plain autograd gives for the whole batch, and every draw and
buffer its place.
"""

from functools import partial

import pytest
import torch
from steps import CPU, NO_REQUESTS, parts_of
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import TensorDataset

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.train.state.state import State
from elastic.train.step.step import Step

SHARDS, STEPS, BATCH, CLASSES = 6, 2, 24, 3


def linear(**options):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8, **options), nn.Tanh(), nn.Linear(8, CLASSES, **options))


def data():
    draw = torch.Generator().manual_seed(3)
    return torch.randn(2 * BATCH, 6, generator=draw), torch.randint(CLASSES, (2 * BATCH,), generator=draw)


def steps(net, **others):
    """The steps of a world of one, one epoch."""
    order = SampleOrder(
        seed=5, samples=2 * BATCH, global_batch=BATCH, shards=SHARDS, epochs=1, tail=Tail.DROP
    )
    parts = parts_of(State(net=net, **others), order)
    loader = Loader(dataset=TensorDataset(*data()), order=order, device=CPU)
    batches = loader.steps(range(SHARDS), 1)
    for number in range(1, order.steps + 1):
        yield Step(number, parts, partial(next, batches), lambda _number: NO_REQUESTS)


def gradient(parameters):
    return torch.cat([p.grad.reshape(-1) for p in parameters])


def assert_close_to(found, expected):
    """Relative to the norm of the whole gradient; float32."""
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def whole_batch(step):
    indices = torch.cat([batch.indices for batch in step._batches])
    x, y = data()
    return x[indices], y[indices]


def coupled_loss(outputs_sum, products):
    """Depends on every pair of samples, as Barlow Twins' loss does."""
    mean = outputs_sum / BATCH
    return (products / BATCH - torch.outer(mean, mean)).square().sum()


def test_gradient_of_a_batch_coupled_loss_is_that_of_the_whole_batch():
    """Two sums in one step, both needed by the loss, and a penalty on the parameters; autograd does
    it all at once.
    """
    net = linear()
    step = next(steps(net))
    first = step.sum(lambda batch: net(batch.data[0]).sum(0))
    second = step.sum(lambda batch: net(batch.data[0]).T @ net(batch.data[0]))
    step.backward(coupled_loss(first, second) + 0.1 * net[0].weight.square().sum())
    found = gradient(net.parameters())
    net.zero_grad()
    outputs = net(whole_batch(step)[0])
    (coupled_loss(outputs.sum(0), outputs.T @ outputs) + 0.1 * net[0].weight.square().sum()).backward()
    assert_close_to(found, gradient(net.parameters()))


def test_gradient_and_value_of_a_mean_loss_are_those_of_the_whole_batch():
    """The form that goes backward shard by shard."""
    net = linear()
    step = next(steps(net))
    value = step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
    found = gradient(net.parameters())
    net.zero_grad()
    x, y = whole_batch(step)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    assert_close_to(found, gradient(net.parameters()))
    assert value == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_a_scaler_scales_the_gradient_and_not_the_loss(form):
    """A power of two is exact in binary: unscaled again, the gradient has the very bits of a run
    without scaler.
    """
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        net = linear()
        step = next(steps(net, **({} if scaler is None else {"scaler": scaler})))
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

    for step in steps(net):
        for _ in range(2):
            step.sum(draw)
    assert len(set(drawn)) == 24
