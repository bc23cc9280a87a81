"""In an audited step, what a backward writes into a buffer is refused by name."""

import pytest
import torch
from audited import CLASSES, Training
from steps import ALONE
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint

from elastic.errors import UsageError


class Writing(nn.Module):
    """A hook writes into a buffer while gradients are computed, or a second forward does."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.norm, self.way = nn.Linear(6, CLASSES), nn.BatchNorm1d(CLASSES), way
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        y = checkpoint(self.normed, x, use_reentrant=False) if "checkpoint" in self.way else self.normed(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        return y

    def normed(self, x):
        if self.way == "checkpoint":
            self.seen += 1
        return self.norm(self.layer(x))

    def hook(self, _gradient):
        if self.way == "through data":
            self.seen.data.add_(1)


def train(way):
    net = Writing(way)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in Training(ALONE, {"net": net, "optimizer": optimizer}).steps():
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        optimizer.step()


@pytest.mark.parametrize("way", ["through data", "checkpoint"])
def test_what_a_backward_changes_is_refused_in_an_audit(way):
    train("checkpoint of norms")  # which moves averages twice
    with pytest.raises(UsageError, match=r"found another content in net\.seen;"):
        train(way)
