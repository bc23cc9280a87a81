"""Shards of different sizes, as a collate that joins boxes makes them, give one result."""

import torch
from steps import ALONE, SAMPLES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.train.state.state import State

SHARDS = 8


class Boxes(torch.utils.data.Dataset):
    """Images with none to three boxes, of six features and a target each."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, sample):
        draw = torch.Generator().manual_seed(sample)
        return torch.randn(sample % 4, 6, generator=draw), torch.randn(sample % 4, generator=draw)


def join(samples):
    boxes, targets = zip(*samples, strict=True)
    return torch.cat(boxes), torch.cat(targets)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Dropout(0.3), nn.Linear(17, 1))


def losses_of(net, batch):
    boxes, targets = batch
    return F.smooth_l1_loss(net(boxes)[:, 0], targets, reduction="none")


def ratio(step, net):
    """The mean over all boxes of the global batch."""

    def sums(batch):
        losses = losses_of(net, batch)
        return torch.stack([losses.sum(), torch.tensor(float(len(losses)))])

    total = step.sum(sums)
    step.backward(total[0] / total[1])


def steps_over_boxes(member, net, **others):
    return steps(member, State(net=net, **others), dataset=Boxes(), collate=join)


def test_a_ratio_of_sums_has_the_gradient_of_the_mean_over_all_boxes():
    """Beside plain autograd over the whole batch; shards have different numbers of boxes."""
    net = network().eval()
    step = next(steps_over_boxes(ALONE, net))
    of_batch = [batch.indices.tolist() for batch in step._batches]
    assert len({sum(sample % 4 for sample in of_shard) for of_shard in of_batch}) > 1
    whole = join([Boxes()[sample] for of_shard in of_batch for sample in of_shard])
    expected = torch.autograd.grad(losses_of(net, whole).mean(), net.parameters())
    ratio(step, net)
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
