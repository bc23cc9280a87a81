"""Recipes of many kinds, as people write them, are exact: the same bits after every step at every
world size, whichever shards a rank has, audited or not, and where the state of a step is loaded
into objects that were built again.

Each recipe gives its State and its body, which does one step. The usual kinds are the scripts of
examples/, which tests/process/test_documents.py starts, kills and resumes.
"""

import copy
import random
from itertools import count

import pytest
import torch
from saved_state import saved
from steps import BATCH, CLASSES, FEATURES, SAMPLES, loss_of, samples, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import elastic
from elastic.proof.audit import StepAudit
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

STEPS, RESUMED_AT, LATE = 6, 4, 4
TURNING = 2  # workers of the run whose ranks have other shards in each step, and audit each other
WIDTH = 8
RECIPES = {}


def recipe(worlds=(TURNING, 3), **settings):
    def register(make):
        RECIPES[make.__name__] = make, worlds, {"epochs": 3} | settings
        return make

    return register


def perceptron(*extra):
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *extra, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def tokens():
    """int64 [SAMPLES, 9] below 11."""
    return TensorDataset(torch.randint(11, (SAMPLES, 9), generator=torch.Generator().manual_seed(3)))


def next_token(net, batch, end=8):
    return F.cross_entropy(net(batch.data[0][:, :end]).flatten(0, 1), batch.data[0][:, 1 : end + 1].flatten())


@recipe()
def every_dtype():
    """Parameters of bfloat16, float16, float64 and complex64, one without dimensions and one
    without elements.
    """
    low, half, wide = (perceptron().to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64))
    low.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    half.none = nn.Parameter(torch.ones(0, dtype=torch.float16))
    wide.wave = nn.Parameter(torch.randn(CLASSES, dtype=torch.complex64))
    wide.register_buffer("carrier", torch.randn(CLASSES, dtype=torch.complex64))
    optimizers = {
        "a": torch.optim.NAdam(low.parameters(), lr=1e-2),
        "b": torch.optim.SGD(half.parameters(), lr=1e-2, momentum=0.9),
        "c": torch.optim.Adam(wide.parameters(), lr=1e-2, amsgrad=True),
    }

    def loss(batch):
        x, y = batch.data
        waves = wide(x.double()) * wide.wave * wide.carrier
        found = low(x.bfloat16()) * low.scale, half(x.half()) + half.none.sum(), waves.abs()
        return sum(F.cross_entropy(one.float(), y) for one in found)

    def body(step):
        step.mean_loss(loss)
        for optimizer in optimizers.values():
            optimizer.step()

    return State(low=low, half=half, wide=wide, **optimizers), body


@recipe()
def overflowing():
    """Shard 1's gradient overflows in step 2, which all ranks skip. A zero in the place of no
    gradient would let weight decay shrink the unused layer; one shard alone uses `rare`.
    """
    net = nn.ModuleDict({"net": nn.Linear(FEATURES, CLASSES), "unused": nn.Linear(2, 2)})
    net.rare = nn.Parameter(torch.ones(CLASSES))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def body(step):
        def loss(batch):
            outputs = net["net"](batch.data[0]) * (net.rare if batch.shard == 4 else 1)
            is_huge = step.number == 2 and batch.shard == 1
            return F.cross_entropy(outputs, batch.data[1]) * (1e38 if is_huge else 1)

        step.mean_loss(loss, scaler)
        assert net.rare.grad is not None and [p.grad for p in net["unused"].parameters()] == [None] * 2
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step.number == 1 else 512.0)

    return State(net=net, optimizer=optimizer, scaler=scaler), body


@recipe()
def common_memory():
    """Autograd gives gradients that are parts of one memory, the same memory, or a part of that of
    the loss's gradient. One optimizer's update comes before a clip of the other's.
    """
    net = nn.ModuleDict({name: nn.Linear(FEATURES, FEATURES, bias=False) for name in "qkv"})
    head = nn.Linear(FEATURES, CLASSES)
    head.scale = nn.Parameter(torch.tensor(0.1))
    a, b = (torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (net, head))

    def values(batch):
        x, y = batch.data
        both = F.linear(x, torch.cat([net["q"].weight, net["k"].weight]))
        twins = net["q"].weight.view(-1) + net["v"].weight.view(-1)
        loss = F.cross_entropy(head(both[:, :FEATURES] * both[:, FEATURES:]), y)
        return torch.stack([loss, twins.square().mean(), head.scale])

    def body(step):
        total = step.sum(values)
        step.backward(total[0] * torch.exp(-total[2]) + total[1] + total[2])
        a.step()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        b.step()

    return State(net=net, head=head, a=a, b=b), body


@recipe()
def line_search():
    """LBFGS calls the closure, and with it `mean_loss`, several times in a step."""
    net = perceptron()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def body(step):
        def closure():
            optimizer.zero_grad()
            return step.mean_loss(loss_of(net))

        optimizer.step(closure)

    return State(net=net, optimizer=optimizer), body


@recipe(worlds=(TURNING,), dataset=tokens())  # each process imports the compiler, for four seconds
def compiled():
    """Graphs of torch.compile, over batches of two lengths."""
    net = nn.Sequential(nn.Embedding(11, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 11))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    fast = torch.compile(net, backend="aot_eager")  # the default one needs a C++ compiler

    def body(step):
        step.mean_loss(lambda batch: next_token(fast, batch, 8 - step.number % 2))
        optimizer.step()

    return State(net=net, optimizer=optimizer), body


class ManyParts(nn.Module):
    """Statistics of a batch, dropout, a layer that few shards use, and a parameter that no
    optimizer holds and no backward reaches at first.
    """

    def __init__(self):
        super().__init__()
        self.body = perceptron(nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
        self.rare = nn.Parameter(torch.ones(CLASSES))
        self.loose = nn.Parameter(torch.ones(CLASSES))
        self.register_buffer("told", torch.zeros(CLASSES))

    def forward(self, x, *, step=0, is_rare=False):
        y = self.body(x) + self.told.tanh()
        y = y * self.loose if step >= LATE else y
        return y * self.rare if is_rare else y


def mean_form(step, net):
    """Frozen layers come and go. As in TRADES, the function leaves the evaluation mode in which it
    computed clean outputs: else only the first shard of each rank would have dropout.
    """
    net.body[0].requires_grad_(step.number != LATE)
    net.train(step.number != LATE)

    def loss(batch):
        outputs = net(batch.data[0], step=step.number, is_rare=batch.shard == 2)
        net.eval()
        with torch.no_grad():
            clean = net(batch.data[0])
        return F.cross_entropy(outputs, batch.data[1]) + (outputs - clean).square().mean()

    step.mean_loss(loss)
    assert not net.training and not net.body.training


def sum_form(step, net):
    """Two sums with draws of their own, whose functions leave modes and an attribute, and a call
    and draws of the body in between.
    """
    net.body[0].requires_grad_(True)
    net.eval()

    def first(batch):
        net.train()
        net.strength = step.number / 10
        return net(batch.data[0], step=step.number).double().square().sum(0)

    def second(batch):
        outputs = net(batch.data[0], is_rare=batch.shard == 4)
        return (outputs * torch.rand(CLASSES)).sum(0)[None] + batch.uniform(1).sum()

    total = step.sum(first)
    assert net.training
    net.body(torch.ones(4, FEATURES))  # moves averages, which the step puts back
    noise = step.sum(second)
    counted = step.sum(lambda batch: torch.ones(batch.data[1].shape, dtype=torch.int32))
    net.drawn.last = float(torch.rand(())) + random.random()
    loss = (total / BATCH).square().mean() + (noise / BATCH).exp().sum() + net.body[0].weight.square().sum()
    net.body.eval()  # after the last sum: the body's own, which no rank takes back
    step.backward(loss * net.strength * counted.sum())
    net.told.add_(total.detach().float())
    assert net.training and not net.body.training


def form_by_hand(step, net):
    """Sums without a graph alone, from which the body makes gradients."""
    gradient = step.sum(lambda batch: net(batch.data[0]).detach().mean(0))
    net.rare.grad = gradient.clone()
    net.body[0].weight.grad = torch.full_like(net.body[0].weight, float(gradient.sum()))


@recipe()
def parts_and_modes():
    """One form of a step after the other."""
    net = ManyParts()
    optimizer = torch.optim.AdamW([p for name, p in net.named_parameters() if name != "loose"], lr=1e-2)

    def body(step):
        (form_by_hand, mean_form, sum_form)[step.number % 3](step, net)
        if net.loose.grad is not None:
            with torch.no_grad():
                net.loose -= 0.1 * net.loose.grad
            net.loose.grad = None
        optimizer.step()
        net.train()

    net.drawn = elastic.Values(last=0.0)
    return State(net=net, optimizer=optimizer, drawn=net.drawn), body


class OwnUpdate:
    """An optimizer that derives from nothing, and has none of torch's hooks."""

    def __init__(self, parameters):
        self.parameters, self.ways = list(parameters), count()

    def step(self):
        for p in self.parameters:
            new = p.detach() - 0.1 * p.grad.sign()
            match next(self.ways) % 3:
                case 0:
                    p.data = new
                case 1:
                    p.data.copy_(new)
                case 2:
                    with torch.no_grad():
                        p.copy_(new)


@recipe()
def own_optimizer():
    """No optimizer of torch holds what is trained, and the State holds none."""
    net, average = perceptron(nn.BatchNorm1d(WIDTH)), perceptron()
    own = OwnUpdate(net.parameters())

    def body(step):
        def checkpointed(batch):
            outputs = checkpoint(net, batch.data[0], use_reentrant=False)
            return F.cross_entropy(outputs, batch.data[1])

        assert [p.grad for p in net.parameters()] == [None] * 6
        if step.number % 2:
            step.mean_loss(loss_of(net))
        else:
            step.backward(step.sum(checkpointed) / step.shards + 1e-3 * net[0].weight.square().sum())
        clip_grad_norm_(net.parameters(), 0.5)
        own.step()
        assert [p.grad for p in average.parameters()] == [None] * 4

    return State(net=net, average=average), body


class Trainer:
    """An object of the recipe's own that holds everything, and saves copies."""

    def __init__(self):
        self.net = perceptron(nn.BatchNorm1d(WIDTH))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu")

    def state_dict(self):
        return {name: copy.deepcopy(each.state_dict()) for name, each in vars(self).items()}

    def load_state_dict(self, state):
        for name, each in vars(self).items():
            each.load_state_dict(state[name])


@recipe()
def trainer():
    """Its BatchNorm's buffers are put back for each shard as well."""
    mine = Trainer()

    def body(step):
        step.mean_loss(loss_of(mine.net), mine.scaler)
        mine.scaler.step(mine.optimizer)
        mine.scaler.update()

    return State(trainer=mine), body


class Curriculum(TensorDataset):
    """Its noise grows as the loop sets it."""

    strength = 0.0

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + self.strength * torch.randn(inputs.shape), label


CURRICULUM = Curriculum(*samples().tensors)


@recipe(dataset=CURRICULUM)
def changing():
    """Layers are unfrozen and frozen again, the optimizer gets another group, which a resume does
    not do again, and a new head replaces the old one. The batch of a step is loaded when the step
    first computes, with the noise that the body has set: the resumed run begins with that of the
    last step.
    """
    net = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(2)), nn.Tanh(), perceptron())
    net[:2].requires_grad_(False)
    optimizer = torch.optim.SGD([*net[0].parameters(), *net[3].parameters()], lr=0.1, momentum=0.9)

    def body(step):
        CURRICULUM.strength = step.number / 10
        match step.number:
            case 2:
                net[0].requires_grad_(True)
            case 3:
                net[1].requires_grad_(True)
                optimizer.add_param_group({"params": list(net[1].parameters()), "lr": 0.05})
            case 4:
                head = net[3][2]
                for parameter in head.parameters():
                    del optimizer.state[parameter]
                net[3][2] = nn.Linear(WIDTH, CLASSES)
                optimizer.param_groups[0]["params"][-2:] = list(net[3][2].parameters())
            case 5:
                net[0].requires_grad_(False)
        step.mean_loss(loss_of(net))
        optimizer.step()

    return State(net=net, optimizer=optimizer), body


def train(member, name):
    """The checksums after each step, and what the chain value is made of in them: calm, and from
    the step on at which it was resumed.
    """
    make, _, settings = RECIPES[name]
    turns = member.world_size == TURNING

    def trained(first, kept=None):
        torch.manual_seed(0)
        state, body = make()
        state.begin()
        if kept is not None:
            state.load(kept)
        entries, numbers = [], []
        for step in steps(
            member, state, first=first, audits=StepAudit if turns else None, turns=turns, **settings
        ):
            # Such as for a norm that is logged there: a process that takes over has none.
            assert all(p.grad is None for module in state.modules for p in module.parameters())
            body(step)
            outcome = step.outcome or step.end_by_hand()
            numbers.append([number.hex() for number in outcome.losses])
            entries.append(checksum_of(state.flatten()).entries)
            if step.number == RESUMED_AT - 1:
                kept = saved(state)
        return entries, numbers, kept

    calm, numbers, kept = trained(1)
    return [calm, numbers, *trained(RESUMED_AT, kept)[:2]]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_this_kind_is_exact(ranks, name):
    (alone,) = ranks.run(1, train, name)
    calm, numbers, resumed, done_again = alone
    assert len(calm) == STEPS and calm[0] != calm[-1]
    assert (resumed, done_again) == (calm[RESUMED_AT - 1 :], numbers[RESUMED_AT - 1 :])
    for world_size in RECIPES[name][1]:
        assert ranks.run(world_size, train, name) == [alone] * world_size
