"""What is exact and perhaps not meant is named after the first step; what is meant is not."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
from elastic.train.loop.record import first_step_notes
from elastic.train.state.state import State


class Queue(nn.Module):
    """A memory bank that forward fills, beside a constant and a BatchNorm."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        self.register_buffer("queue", torch.zeros(CLASSES, dtype=dtype))
        self.register_buffer("constant", torch.rand(5, dtype=torch.float64))

    def forward(self, x):
        y = self.body(x)
        self.queue.copy_((100 * y.detach().amax(0)).to(self.queue.dtype))
        return y


def averaged(member, kind, shards=8):
    torch.manual_seed(0)
    net = Queue() if kind == "queue" else nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))
    step = next(steps(member, State(net=net), shards=shards))
    step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
    return step.averaged


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_that_become_a_mean_are_named_but_for_running_averages_of_torch(ranks, world_size):
    """Also where each rank has one shard, and sees a difference from the mean alone."""
    assert ranks.run(world_size, averaged, "queue", 2 * world_size) == [["net.queue"]] * world_size
    assert ranks.run(world_size, averaged, "queue", 2) == [["net.queue"]] * world_size
    assert ranks.run(world_size, averaged, "norm") == [[]] * world_size


def test_hooks_and_means_are_said_with_what_to_write():
    net = Queue()
    assert first_step_notes(State(net=net), [], 8) == []
    for parameter in net.body.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    hooks, means = first_step_notes(State(net=net), ["net.queue"], 8)
    assert hooks.startswith("net.body.0.weight, net.body.0.bias, net.body.1.weight has a hook")
    assert means.startswith("net.queue: a buffer of floats that a forward changes becomes the mean")
    assert first_step_notes(State(net=net), ["net.queue"], 1) == []


def test_integers_that_differ_are_refused_with_how_to_keep_a_queue():
    net = Queue(torch.int64)
    step = next(steps(ALONE, State(net=net)))
    with pytest.raises(UsageError, match=r"by a step\.sum\(\.\.\.\)"):
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
