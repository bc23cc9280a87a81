"""Buffers that a forward changes: the gradient is that of each shard alone in plain PyTorch, and
the bits are the same at every world size.
"""

import copy

import pytest
import torch
from steps import ALONE, FEATURES, steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.errors import UsageError
from elastic.train.state.state import State


class Scaled(nn.Module):
    """A running scale, which forward updates before it divides by it."""

    def __init__(self, update):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)
        self.register_buffer("scale", torch.ones(4))
        self.update = update

    def forward(self, x):
        y = self.layer(x)
        new = 0.5 * self.scale + 0.5 * (1 + y.detach().abs().mean(0))
        if self.update == "data":
            self.scale.data.mul_(new)
        elif self.update == "data assigned":
            self.scale.data = new
        else:
            self.scale = new
        return y / self.scale


class Checkpointed(nn.Module):
    """Forward is computed again in backward, from what the buffers are then."""

    def __init__(self, body, *, use_reentrant):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.body = body
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant)


def old_spectral():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(FEATURES, 5)), nn.Tanh(), nn.Linear(5, 4))


def normalized():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Linear(5, 4))


MODELS = {
    "batch norm": normalized,
    "old spectral norm": old_spectral,
    "through data": lambda: Scaled("data"),
    "data assigned": lambda: Scaled("data assigned"),
    "assigned": lambda: Scaled("assigned"),
    "checkpointed batch norm": lambda: Checkpointed(normalized(), use_reentrant=False),
    "reentrant batch norm": lambda: Checkpointed(normalized(), use_reentrant=True),
    "checkpointed cache": lambda: Checkpointed(Outside(make_anew), use_reentrant=False),
}


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]()


def energy(net):
    return lambda batch: net(batch.data[0]).square().sum()


def computed(step, net, form):
    if form == "mean":
        step.mean_loss(energy(net))
    else:
        step.backward(step.sum(energy(net)) / 8)


def shard_alone(net, batch):
    """In plain PyTorch: (gradients, buffers that forward left) of one shard, from these buffers."""
    alone = copy.deepcopy(net)
    loss = energy(alone)(batch) / 8
    left = {name: buffer.clone() for name, buffer in alone.named_buffers()}
    loss.backward()
    return [p.grad for p in alone.parameters()], left


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_that_changes_buffers_has_its_plain_gradient(name, form):
    """All graphs of a sum are alive at once: what a later shard writes into a buffer must not reach
    the backward of an earlier one.
    """
    net = model_of(name)
    opening = copy.deepcopy(net)
    step = next(steps(ALONE, State(net=net)))
    alone = [shard_alone(opening, batch) for batch in step._batches]
    computed(step, net, form)
    for parameter, *of_shards in zip(net.parameters(), *[gradients for gradients, _ in alone], strict=True):
        torch.testing.assert_close(parameter.grad, sum(of_shards))
    for path, buffer in net.named_buffers():
        values = torch.stack([left[path] for _, left in alone]).double()
        torch.testing.assert_close(buffer, values.mean(0).to(buffer.dtype))


WRITES = {
    "in place": lambda net: net.scale.fill_(4.0),
    "assigned": lambda net: setattr(net, "scale", torch.full((4,), 4.0)),
}


@pytest.mark.parametrize("ending", ["mean_loss", "backward", "by hand"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_buffer_set_between_a_sum_and_the_gradients_stays(ending, write):
    """A centre or codebook that is updated from a sum, before the loss: it was put back to what the
    step began with, in every step. A large buffer is neither saved nor loaded for each shard.
    """
    net = Scaled(None)
    net.forward = lambda x: net.layer(x) / net.scale
    net.register_buffer("table", torch.zeros(2**14))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = next(steps(ALONE, State(net=net, optimizer=optimizer)))
    total = step.sum(
        lambda batch: net.layer(batch.data[0]).square().sum() * (1 if ending == "backward" else 0)
    )
    write(net)
    net.table.fill_(3.0)
    if ending == "mean_loss":
        step.mean_loss(energy(net))
        alone = copy.deepcopy(net)
        other = next(steps(ALONE, State(net=alone)))
        alone.forward = lambda x: alone.layer(x) / 4.0
        other.mean_loss(energy(alone))
        assert torch.equal(net.layer.weight.grad, alone.layer.weight.grad)
    elif ending == "backward":
        step.backward(total)
    else:
        step.sum(lambda batch: net.layer(batch.data[0]).detach().sum())
        optimizer.step()
    assert net.scale.tolist() == [4.0] * 4
    assert net.table.unique().tolist() == [3.0]


def test_averages_that_the_bodys_own_forward_moves_are_put_back():
    """A penalty on a fixed batch, in training mode: the averages are those of the shards alone."""
    left = []
    for calls in (0, 2):
        net = model_of("batch norm")
        step = next(steps(ALONE, State(net=net)))
        total = step.sum(energy(net))
        for _ in range(calls):
            net(torch.ones(2, FEATURES))
        step.backward(total)
        left.append([buffer.tolist() for buffer in net.buffers()])
    assert left[0] == left[1]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_buffer_that_forward_and_body_both_change_is_refused(write):
    net = Scaled("assigned")
    step = next(steps(ALONE, State(net=net)))
    step.sum(energy(net))
    write(net)
    with pytest.raises(UsageError, match=r"the loop's body changed .*net\.scale.* between a sum"):
        step.mean_loss(energy(net))


@pytest.mark.parametrize("value", [torch.zeros(5), torch.zeros(1, dtype=torch.float64), None])
def test_a_buffer_that_forward_gives_another_form_is_refused(value):
    """Ranks would sum vectors of different lengths."""
    net = nn.Linear(FEATURES, 1)
    net.register_buffer("mean", torch.zeros(1))

    def loss(batch):
        net.mean = value
        return energy(net)(batch)

    with pytest.raises(UsageError, match=r"net\.mean to stay torch\.float32 of shape \[1\]"):
        next(steps(ALONE, State(net=net))).mean_loss(loss)


class Outside(nn.Module):
    """A buffer that is no part of the state."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)
        self.register_buffer("extra", torch.zeros(4), persistent=False)
        self.use = forward

    def forward(self, x):
        self.use(self, x)
        return self.layer(x)


def make_anew(net, _x):
    net.extra = torch.zeros(4)


def counted_apart(member):
    """Each shard counts the samples of one class: another number on each."""
    net = nn.Linear(FEATURES, 4)
    net.register_buffer("seen", torch.tensor(0))

    def loss(batch):
        net.seen += (batch.data[1] == 0).sum()
        return energy(net)(batch)

    try:
        next(steps(member, State(net=net))).mean_loss(loss)
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 3])
def test_integers_that_differ_between_shards_are_refused(ranks, world_size):
    """Shard 0's count was taken for that of the whole batch."""
    for said in ranks.run(world_size, counted_apart):
        assert "same after every shard" in said and "net.seen" in said
