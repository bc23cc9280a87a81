"""Whatever shards a rank has in a step, the run leaves the same bits."""

from functools import cache

import cut_anew
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

CLASSES, SHARDS, LATE = 3, 6, 4


class Net(nn.Module):
    """Statistics of a batch, dropout, buffers of several kinds, a large one that changes late, a
    layer that few shards use, and a parameter that no optimizer holds.
    """

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, CLASSES)
        )
        self.rare = nn.Parameter(torch.ones(CLASSES))
        self.loose = nn.Parameter(torch.ones(CLASSES))
        self.register_buffer("moving", torch.zeros(CLASSES, dtype=torch.float64))
        self.register_buffer("large", torch.zeros(2**14))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("told", torch.zeros(CLASSES))

    def forward(self, x, *, step=0, is_rare=False):
        y = self.body(x) + self.told.tanh()
        with torch.no_grad():
            self.moving.lerp_(y.double().mean(0), 0.1)
            if step == LATE:
                self.large[:CLASSES] += y.mean(0)
            self.seen += 1
        if step >= LATE:  # no backward has reached it before
            y = y * self.loose
        return y * self.rare if is_rare else y


def mean_form(step, net, scaler):
    """Frozen layers come and go; the modes are set inside, and differ from those of the body."""
    net.body[0].requires_grad_(step.number % 3 > 0)
    net.train(step.number % 2 > 0)

    def loss(batch):
        net.train()
        x, y = batch
        return F.cross_entropy(net(x, step=step.number, is_rare=batch.shard == 2), y)

    step.mean_loss(loss, scaler)
    assert net.training and net.body.training


def positive(batch):
    """Of another form than `ones`."""
    return (batch.data[1] > 0).reshape(2, -1)


def ones(batch):
    return torch.ones(batch.data[1].shape, dtype=torch.int32)


def sum_form(step, net, scaler):
    """Two sums, whose functions leave modes and an attribute, and a call of the body in between."""
    net.eval()

    def first(batch):
        net.train()
        net.strength = step.number / 10
        return net(batch.data[0], step=step.number).double().square().sum(0)

    coupled = step.sum(first)
    assert net.training
    net.body(torch.ones(4, 6))  # moves averages, which the step puts back
    net.told.add_(coupled.detach().float())
    noise = step.sum(
        lambda batch: (net(batch.data[0], is_rare=batch.shard == 4) * torch.rand(CLASSES)).sum(
            0, keepdim=True
        )
    )
    counted = step.sum(positive if step.number == LATE else ones)
    loss = (
        (coupled / 24).square().mean() + (noise / 24).exp().sum() + 1e-2 * net.body[0].weight.square().sum()
    )
    net.body.eval()  # after the last sum: the body's own, which no rank takes back
    step.backward(loss * net.strength * counted.sum(), scaler)
    assert net.training and not net.body.training


def by_hand(step, net, scaler):
    """Sums without a graph alone, from which the body makes gradients."""
    gradient = step.sum(lambda batch: net(batch.data[0]).detach().mean(0))
    with torch.no_grad():
        net.rare.grad = gradient.clone()
        net.body[0].weight.grad = torch.full_like(net.body[0].weight, float(gradient.sum()))


FORMS = {"mean": mean_form, "sum": sum_form, "hand": by_hand}


def train(member, cut, form, is_scaled, more):
    """A whole small run; what it leaves behind, in bits. cut: a function of cut_anew, by name."""
    torch.manual_seed(0)
    net = Net()
    held = [p for name, p in net.named_parameters() if name != "loose"]
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if is_scaled else None
    state = State(net=net, optimizer=optimizer, **({} if scaler is None else {"scaler": scaler}))
    seen = []
    of_step = getattr(cut_anew, cut)(member.world_size, SHARDS)
    for step in cut_anew.steps(member, state, of_step, shards=SHARDS, **dict(more)):
        FORMS[form](step, net, scaler)
        if net.loose.grad is not None:
            with torch.no_grad():
                net.loose -= 0.1 * net.loose.grad
            net.loose.grad = None
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        outcome = step.outcome or step.end_by_hand()
        seen.append([number.hex() for number in outcome.losses])
    return {"digest": checksum_of(state.flatten()).whole, "seen": seen, "modes": net.training}


@pytest.fixture(scope="module")
def trained(ranks):
    """What each rank of a world leaves behind; each run is computed once."""
    return cache(lambda world_size, *arguments: ranks.run(world_size, train, *arguments))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("form", "is_scaled"), [("mean", True), ("sum", False), ("hand", False)])
def test_a_run_leaves_the_same_bits_at_every_world_size(trained, world_size, form, is_scaled):
    """The digest is of parameters, buffers, moments and scaler; losses and norms agree too."""
    alone = trained(1, "equal", form, is_scaled, ())
    assert trained(world_size, "equal", form, is_scaled, ()) == alone * world_size


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("form", "is_scaled"), [("mean", True), ("sum", False), ("hand", False)])
def test_a_cut_that_changes_at_every_step_leaves_the_same_bits(trained, world_size, form, is_scaled):
    """Losses, norms and the state are those of one rank."""
    alone = trained(1, "equal", form, is_scaled, ())
    assert trained(world_size, "turning", form, is_scaled, ()) == alone * world_size


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_audits_agree_where_spans_change(trained, world_size, form):
    """Every step is audited: an audit that missed a rank would hang, or blame it."""
    alone = trained(1, "equal", form, False, ())
    assert trained(world_size, "turning", form, False, (("audits", True),)) == alone * world_size
