"""The first gradient is as far from that of the whole batch as the loss is from a mean."""

from functools import partial

import pytest
import torch
from steps import ALONE, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.proof.for_check import WholeBatchGradient
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def first_step(net, *, watched=True, **others):
    """The first step of a run, of 24 samples in 4 shards."""
    state = State(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **others)
    return next(steps(ALONE, state, shards=4, audits=WholeBatchGradient if watched else None))


def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *more, nn.Tanh(), nn.Linear(8, 3))


def mean(model, batch):
    return F.cross_entropy(model(batch.data[0]), batch.data[1])


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.Identity, ""),
        (partial(nn.Dropout, 0.5), "random numbers"),
        (partial(nn.BatchNorm1d, 8), "BatchNorm"),
    ],
)
@pytest.mark.parametrize("kind", ["mean", "scaled mean", "sum", "in the place of a mean"])
def test_a_loss_that_is_no_mean_over_samples_is_found(layer, says, kind):
    """The mean of the shards' sums is a fourth of the sum over the batch. What differs by shard in
    training is compared in evaluation mode: the gradient is another one, the finding is the same.
    """
    model = net(layer())
    scaler = torch.amp.GradScaler("cpu") if kind == "scaled mean" else None
    step = first_step(model, **({} if scaler is None else {"scaler": scaler}))

    if kind == "sum":
        total = step.sum(lambda batch: model(batch.data[0]).double().square().sum(0))
        step.backward((total / 24 - 1).square().sum())
    else:
        power = 1 if kind == "in the place of a mean" else 0
        step.mean_loss(lambda batch: mean(model, batch) * len(batch.data[0]) ** power, scaler=scaler)

    found = step.audit.found
    assert found.obstacle == "" and bool(found.in_eval) == bool(says) and says in (found.in_eval or "")
    expected = 0.75 if kind == "in the place of a mean" else 0.0
    assert found.difference == pytest.approx(expected, abs=1e-6)
    assert found.parameter.startswith("net.")
    assert all(module.training for module in model.modules())


def fails_for_the_whole(model, batch):
    assert len(batch.data[0]) == 6
    return mean(model, batch)


def fails_backward(model, batch):
    loss = mean(model, batch)
    if len(batch.data[0]) > 6:
        loss.register_hook(lambda _: 1 / 0)
    return loss


def draws_noise(model, batch):
    return F.cross_entropy(model(batch.data[0] + torch.randn(6)), batch.data[1])


def trains_again(model, batch):
    return mean(model.train(), batch)


@pytest.mark.parametrize(
    ("layer", "loss", "says"),
    [
        (nn.Identity, fails_for_the_whole, "the function does not take the whole batch"),
        (nn.Identity, fails_backward, "the backward does not take the whole batch"),
        (nn.Identity, draws_noise, "random numbers"),
        (partial(nn.BatchNorm1d, 8), trains_again, "BatchNorm"),
        (partial(nn.BatchNorm1d, 8, track_running_stats=False), mean, "BatchNorm"),
        (nn.Identity, lambda model, batch: mean(model, batch) * float("inf"), "not finite"),
    ],
)
def test_what_cannot_be_compared_is_said(layer, loss, says):
    model = net(layer())
    step = first_step(model)

    step.mean_loss(lambda batch: loss(model, batch))

    assert says in step.audit.found.obstacle
    assert step.audit.found.difference is None


@pytest.mark.parametrize("layer", [nn.Identity, nn.Dropout, partial(nn.BatchNorm1d, 8)])
def test_the_comparison_disturbs_nothing(layer):
    """The same loss, gradients, buffers and random numbers with and without it."""
    left = []
    for watched in (False, True):
        model = net(layer())
        step = first_step(model, watched=watched)
        loss = step.mean_loss(lambda batch, model=model: mean(model, batch))
        state = State(net=model)
        gradients = [p.grad.clone() for p in model.parameters()]
        left.append((loss, checksum_of(state.flatten()).whole, gradients, torch.rand(3)))

    (calm, watched) = left
    assert calm[:2] == watched[:2]
    assert all(map(torch.equal, calm[2], watched[2]))
    assert torch.equal(calm[3], watched[3])
