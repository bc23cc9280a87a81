"""What one function of a step leaves behind is of its last shard: another one must not read it."""

import pytest
import torch
from audited import ALONE, CLASSES, Training
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError

FOUND = {}


class Net(nn.Module):
    """Keeps the features and the numbers of its newest batch, as classes of published code do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        self.features = torch.relu(self.body(x))
        FOUND["features"] = self.features.detach()
        self.logits = self.head(self.features - self.center)
        return self.logits


def center(net, step):
    net.center.lerp_(step.sum(lambda _batch: net.features.detach().sum(0)), 0.1)


def center_of_hook(net, step):
    net.center.lerp_(step.sum(lambda _batch: FOUND["features"].sum(0)), 0.1)


def certainty(net, step):
    step.sum(lambda batch: net.logits.detach().softmax(1).gather(1, batch.data[1][:, None]).sum())


def own_center(net, step):
    def of_shard(batch):
        net(batch.data[0])
        return net.features.detach().sum(0)

    net.center.lerp_(step.sum(of_shard), 0.1)


def nothing(net, step):
    step.sum(lambda batch: batch.data[0].sum())


def train(second, *, begins, shards=6):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = Training(ALONE, {"net": net, "optimizer": optimizer}, shards=shards, looks=True, audits=False)
    done = 0
    for step in training.steps():
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        optimizer.step()
        if step.number >= begins:
            second(net, step)
        done += 1
    return done


@pytest.mark.parametrize("begins", [1, 3])
@pytest.mark.parametrize(
    ("second", "name"),
    [(center, "net.features"), (center_of_hook, "FOUND['features']"), (certainty, "net.logits")],
)
def test_a_function_that_reads_what_another_one_left_behind_is_refused(second, name, begins):
    """A centre of features, a feature hook, a metric: at each number of workers the last shard
    is another one. It may begin late.
    """
    with pytest.raises(
        UsageError, match=rf"step {begins}: .* reads what the function of an earlier"
    ) as error:
        train(second, begins=begins)
    assert name in str(error.value)


@pytest.mark.parametrize("second", [own_center, nothing])
def test_a_function_that_computes_what_it_reads_is_left_alone(second):
    assert train(second, begins=1) > 3


def test_one_shard_has_no_other_one():
    assert train(center, begins=1, shards=1) > 3
