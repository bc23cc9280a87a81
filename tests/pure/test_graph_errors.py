"""Errors of autograd that come of one backward for each shard are told in those words."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
from elastic.train.state.state import State


def begun():
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, next(steps(ALONE, State(net=net, optimizer=optimizer)))


def test_a_graph_that_the_body_made_for_all_shards_is_told_as_such():
    """Normalised weights: the second shard's backward finds the graph of the first one gone."""
    net, step = begun()
    rows = F.normalize(net.weight)
    with pytest.raises(UsageError, match=r"step\.mean_loss: the graph of one shard was already used"):
        step.mean_loss(lambda batch: F.cross_entropy(F.linear(batch.data[0], rows), batch.data[1]))


def test_a_label_that_a_function_fills_twice_is_told_as_such():
    """As in DCGAN, which has a backward between the two; here both losses have one."""
    net, step = begun()

    def both(batch):
        outputs = net(batch.data[0]).sigmoid()
        label = torch.ones_like(outputs)
        real = F.binary_cross_entropy(outputs, label)
        return real + F.binary_cross_entropy(outputs, label.fill_(0))

    with pytest.raises(UsageError, match=r"changed in place.*torch\.full_like\(label, 0\)"):
        step.mean_loss(both)
