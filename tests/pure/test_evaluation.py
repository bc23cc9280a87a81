"""An evaluation gives the same bits at every world size, and leaves no trace in the training."""

import random

import numpy as np
import pytest
import torch
from steps import ALONE, CLASSES, Noisy, evaluation, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from elastic.errors import RecipeNotExact, UsageError
from elastic.train.state.state import State


class Counting(nn.Module):
    """A forward that gives its buffer a new tensor each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.detach().sum()
        return x + self.seen


def network():
    torch.manual_seed(0)
    layers = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, CLASSES)
    return nn.Sequential(*layers, Counting())


def bits(value):
    """A tensor as its type, shape and numbers: repr tells -0.0 from 0.0."""

    def shown(each):
        return (each.dtype, each.shape, each.tolist()) if torch.is_tensor(each) else each

    return repr(tree_map(shown, value))


def odd_values():
    """-0.0, what is not finite, and numbers that a sum in float64 would round."""
    numbers = torch.tensor([-0.0, 0.0, float("inf"), 2.0**-1074], dtype=torch.float64)
    return numbers, torch.tensor([2**62, -1, 1 << 53 | 1]), True, np.float32(0.1), torch.zeros(0)


def evaluate_network(member, samples):
    """A model that was left in training mode: dropout draws, BatchNorm would move its averages, and
    a buffer that forward assigns would pass from a block to the next.

    Before and after, the generators give what they would give without it.
    """
    torch.set_num_threads(1)
    net = network()
    before, first = {name: value.clone() for name, value in net.state_dict().items()}, net[4].seen
    changes = [buffer._version for buffer in net.buffers()]
    seen = []

    def sums(batch):
        x, y = batch
        outputs = net(x)
        assert not outputs.requires_grad
        seen.extend(batch.indices.tolist())
        return {
            "loss": F.cross_entropy(outputs, y, reduction="sum"),
            "correct": (outputs.argmax(1) == y).sum(),
            "by class": torch.bincount(y, minlength=CLASSES),
            "parts": (len(y), float(batch.uniform(1).double().sum()), [outputs.double().sum(0)]),
            "odd": odd_values(),
        }

    torch.manual_seed(4), random.seed(4), np.random.seed(4)  # noqa: NPY002
    found = evaluation(member, Noisy(samples), [net]).sum(sums)
    drawn = torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(4), random.seed(4), np.random.seed(4)  # noqa: NPY002
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    # An evaluation between a sum and its gradients has changed nothing, as far as autograd counts.
    assert net[4].seen is first and [buffer._version for buffer in net.buffers()] == changes
    odd = bits(found["odd"])
    return {"found": bits(found), "seen": seen, "odd": odd, "by class": found["by class"].tolist()}


@pytest.mark.parametrize("samples", [3, 19, 60])
def test_an_evaluation_has_the_same_bits_at_every_world_size(ranks, samples):
    """1, 4 and 12 blocks over 1, 2, 3 and 5 ranks. A rank without a block must add nothing at all:
    0.0 would turn -0.0 into 0.0. Each sample counts once, in order.
    """
    (alone,) = ranks.run(1, evaluate_network, samples)
    assert alone["seen"] == list(range(samples))
    assert alone["by class"] == [len(range(k, samples, CLASSES)) for k in range(CLASSES)]
    if samples == 3:
        numbers, whole, _, wide, empty = odd_values()
        assert alone["odd"] == bits((numbers, whole, 1, float(wide), empty.double()))
    for world_size in (2, 3, 5):
        together = ranks.run(world_size, evaluate_network, samples)
        assert [each["found"] for each in together] == [alone["found"]] * world_size
        # The first block of each rank is computed by another one, too.
        assert sorted({sample for each in together for sample in each["seen"]}) == alone["seen"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda _b: None, "found a NoneType"),
        (lambda _b: torch.zeros(2, device="meta"), "found a Tensor"),
        (lambda b: b.data[0].double(), "return sums over the block's samples"),
        (lambda b: {"a": 1} if b.shard else {"b": 1}, "the same for every block"),
    ],
)
def test_values_that_cannot_be_added_are_refused(value, says):
    """No number, or one for each sample, which the smaller last block gives away."""
    with pytest.raises(UsageError) as refused:
        evaluation(ALONE, TensorDataset(torch.zeros(7))).sum(value)
    assert says in str(refused.value)


def evaluate_differing(member, kind):
    """Ranks that read other data or numbers: what a script does on rank 0 alone."""
    net, is_other = network().eval(), member.rank == member.world_size - 1
    if is_other and kind in ("weight", "saved"):
        net[3].weight.data[1, 2].add_(1e-3)
    size = 19 - member.rank * (kind == "smaller part")  # parts: the habit of other trainers
    dataset = TensorDataset(torch.full((size, 6), float(member.rank if "part" in kind else 1)))
    dataset = Noisy(19, np.random.default_rng(0)) if kind == "generator" else dataset
    checksum = member.rank.__str__ if kind == "saved" else str
    limit = 0.25 if is_other and kind == "number" else 0.5

    def above(batch):
        return batch.data[0].sum() if kind == "generator" else (net(batch.data[0]) - limit).double().sum()

    try:
        evaluation(member, dataset, [net], checksum=checksum).sum(above)
    except (UsageError, RecipeNotExact) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("world_size", "kind", "says"),
    [
        (2, "weight", "found others on ranks 0 and 1: the function reads"),
        (3, "number", "found others on ranks 1 and 2: the function reads"),
        (2, "part", "give each rank the same data"),
        (2, "smaller part", "give each rank the whole"),
        (1, "generator", "found other ones; give each rank"),
        (5, "generator", "found other ones; give each rank"),
        (2, "saved", "no error"),
    ],
)
def test_an_evaluation_that_differs_is_refused_on_all_ranks(ranks, world_size, kind, says):
    """As after `if run.is_first: model.load_state_dict(best)`: the sum would be of two models. With
    a generator that nobody sets, all ranks would agree on a sum that other ranks would not give.
    States that differ are found by their own comparison: a machine's error must not end the run.
    """
    for found in ranks.run(world_size, evaluate_differing, kind):
        assert says in found


def test_an_evaluation_inside_the_function_of_a_sum_is_refused():
    """There each rank is alone with its shards: ranks with other numbers of them would wait for
    each other in vain.
    """
    net = network()
    step = next(steps(ALONE, State(net=net)))
    inside = evaluation(ALONE, TensorDataset(torch.zeros(7)), heartbeat=step._parts.heartbeat)
    with pytest.raises(UsageError, match="found one inside the function"):
        step.mean_loss(lambda _batch: inside.sum(lambda _block: 1))
