"""A step gives the gradient that plain autograd gives for the whole batch, to each parameter its
own, and every draw, mode and buffer its place.
"""

import pytest
import torch
from steps import ALONE, BATCH, CLASSES, FEATURES, loss_of, samples, steps
from torch import nn

from elastic.errors import UsageError
from elastic.train.state.state import State
from elastic.train.step.parts import Requests


def linear():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def gradient(parameters):
    return torch.cat([p.grad.reshape(-1) for p in parameters])


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
    outputs = net(samples().tensors[0][torch.cat([batch.indices for batch in step._batches])])
    (coupled_loss(outputs.sum(0), outputs.T @ outputs) + 0.1 * net[0].weight.square().sum()).backward()
    expected = gradient(net.parameters())
    assert float((found - expected).norm() / expected.norm()) < 1e-6  # float32


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


# A sum over shards takes what can be summed, and refuses the rest on every rank; with it ranks say
# to each other what they are asked for.


def counted(member):
    """Numbers that float64 does not hold, beside a loss."""
    net = linear()
    step = next(steps(member, State(net=net)))
    total = step.sum(lambda batch: net(batch.data[0]).square().sum())
    huge = step.sum(lambda batch: torch.tensor(2**53 + 1 + batch.shard))
    step.backward(total / BATCH)
    return [huge.item(), str(huge.dtype), huge.requires_grad, net[0].weight.grad.sum().item().hex()]


def test_whole_numbers_are_summed_exactly_at_every_world_size(ranks):
    """Counting correct answers; above 2^53 a sum in float64 would not be exact."""
    (alone,) = ranks.run(1, counted)
    assert alone[:3] == [8 * (2**53 + 1) + sum(range(8)), "torch.int64", False]
    for world_size in (2, 3):
        assert ranks.run(world_size, counted) == [alone] * world_size


WIDE = torch.float32, torch.float64
FORMS = {
    "found shape [2, 3], torch.float32, with a graph for shard 5": lambda y, shard, _: y[: 1 + (shard == 5)],
    "found shape [3, 3], torch.float64, with a graph for shard 7": lambda y, shard, _: y.to(WIDE[shard == 7]),
    "shape [1, 3], torch.float32, with a graph, as in the steps before": lambda y, _, number: y[:number],
}


def said_of(member, says):
    """What a rank raises, in a step in which a form depends on the shard, or on the step."""
    net = linear()

    def output(batch):
        return FORMS[says](net(batch.data[0]), batch.shard, step.number)

    try:
        for step in steps(member, State(net=net)):
            step.sum(output)
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("says", FORMS)
def test_a_sum_of_changing_form_is_refused_on_every_rank(ranks, says, world_size):
    """gloo ends the process where two ranks send different sizes."""
    assert all(says in said for said in ranks.run(world_size, said_of, says))


def asked(member):
    """The last rank alone asks for a drain; rank 0 for a save and a comparison, one step later."""
    net, found = linear(), []

    def requests(number):
        drains, saves = member.rank == member.world_size - 1 and number == 2, member.rank == 0 and number == 3
        return Requests(drains, snapshot=False, save=saves, compare=saves)

    for step in steps(member, State(net=net), shards=6, requests=requests):
        step.mean_loss(lambda batch: net(batch.data[0]).square().mean())
        net.zero_grad()
        found.append([name for name, is_asked in step.outcome.requests._asdict().items() if is_asked])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_one_rank_asks_for_is_seen_by_all_at_that_step(ranks, world_size):
    """A rank that missed it would train on alone, or hang."""
    assert ranks.run(world_size, asked) == [[[], ["drain"], ["save", "compare"], []]] * world_size
