"""What the first call of a function makes, and later calls find, is a memory or a cache."""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from audited import ALONE, CLASSES, SAMPLES, Training, tensors
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError

OLD = None


class Config:
    """Settings of a recipe, as a class that it never makes an object of."""

    old = None
    calls = 0


class Holder:
    """Keeps something at the first call, in one of several ways."""

    def __init__(self):
        self.old = self.table = None

    def __call__(self, net, x, kind):
        match kind:
            case "a copy of the model":
                self.old = copy.deepcopy(net) if self.old is None else self.old
                return self.old[0](x)
            case "a list of weights":
                if self.old is None:
                    self.old = [p.detach().clone() for p in net.parameters()]
                return self.old[0]
            case "an object with weights":
                self.old = self.old or SimpleNamespace(weight=net[0].weight.detach().clone())
                return self.old.weight
            case "a number":
                self.old = float(net[0].weight.detach().norm()) if self.old is None else self.old
                return self.old
            case "an array":
                self.old = net[0].weight.detach().numpy().copy() if self.old is None else self.old
                return float(self.old.sum())
            case "a running mean":
                if self.old is None:
                    self.old = {"mean": torch.zeros(6)}
                self.old["mean"] = 0.9 * self.old["mean"] + 0.1 * x.mean(0)
                return self.old["mean"]
            case "a growing list":
                self.old = [] if self.old is None else self.old
                self.old.append(len(x))
                return len(self.old)
            case "a teacher":
                if self.old is None:
                    self.old = copy.deepcopy(net)
                with torch.no_grad():
                    for slow, fast in zip(self.old.parameters(), net.parameters(), strict=True):
                        slow.lerp_(fast + x.mean(), 0.1)
                return self.old[0](x)


KINDS = [
    "a copy of the model", "a list of weights", "an object with weights", "a number", "an array",
    "a running mean", "a growing list", "a teacher",
]  # fmt: skip


def plain_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


def classify(net, batch):
    return F.cross_entropy(net(batch.data[0]), batch.data[1])


def first_step(member, make, shards=6):
    """The sentence that the first step of a recipe ends with. make: its function, from its net."""
    torch.set_num_threads(1)
    net = plain_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = Training(member, {"net": net, "optimizer": optimizer}, shards=shards, looks=True, audits=False)
    step, function = next(loop.steps()), make(net)
    before = [p.detach().clone() for p in net.parameters()]
    try:
        step.mean_loss(function)
    except UsageError as error:
        return str(error)
    assert all(map(torch.equal, before, net.parameters()))
    return ""


def holding(net, kind):
    keep = Holder()
    return lambda batch: classify(net, batch) + 0.0 * torch.as_tensor(keep(net, batch.data[0], kind)).sum()


def of_holder(member, kind, shards):
    return first_step(member, lambda net: holding(net, kind), shards)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [1, 6])
def test_what_an_object_makes_at_its_first_call_is_refused_by_name(kind, shards):
    """By one worker alone. It lasts from the first step on, whose weights a process that resumes
    does not have; or it grows inside a container that the first look could not know.
    """
    said = of_holder(ALONE, kind, shards)
    assert said.startswith("step 1: keep.old")


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_worker_refuses_what_it_made_at_its_first_call(ranks, world_size):
    """It was no worker's fault, and a healthy machine left its group for it."""
    for kind in ("a copy of the model", "a running mean"):
        found = ranks.run(world_size, of_holder, kind, 6)
        assert [each.startswith("step 1: keep.old") for each in found] == [True] * world_size


def in_global(net):
    def function(batch):
        global OLD  # noqa: PLW0603
        OLD = copy.deepcopy(net) if OLD is None else OLD
        return classify(net, batch) + 0.0 * OLD[0].weight.sum()

    return function


def in_closure(net):
    old = None

    def function(batch):
        nonlocal old
        if old is None:
            old = [p.detach().clone() for p in net.parameters()]
        return classify(net, batch) + 0.0 * old[0].sum()

    return function


def in_its_own_attribute(net):
    def function(batch):
        if not hasattr(function, "old"):
            function.old = copy.deepcopy(net)
        return classify(net, batch) + 0.0 * function.old[0].weight.sum()

    return function


def in_a_counter_of_its_own(net):
    def function(batch):
        function.calls += 1
        return classify(net, batch) / function.calls

    function.calls = 0
    return function


def in_a_class(net):
    def function(batch):
        if Config.old is None:
            Config.old = copy.deepcopy(net)
        return classify(net, batch) + 0.0 * Config.old[0].weight.sum()

    return function


def in_a_counter_of_a_class(net):
    def function(batch):
        Config.calls += 1
        return classify(net, batch) / Config.calls

    return function


def in_a_default(net):
    def function(batch, cache={}):  # noqa: B006
        if not cache:
            cache["old"] = copy.deepcopy(net)
        return classify(net, batch) + 0.0 * cache["old"][0].weight.sum()

    return function


def in_a_cache(net):
    @functools.cache
    def old():
        return copy.deepcopy(net)

    return lambda batch: classify(net, batch) + 0.0 * old()[0].weight.sum()


def in_a_bounded_cache(net):
    @functools.lru_cache(maxsize=4)
    def scale(size, power=1):
        return net[0].weight.detach().norm() * size**power

    return lambda batch: classify(net, batch) + 0.0 * scale(len(batch.data[0]), power=2)


def in_a_cache_of_random_numbers(net):
    @functools.cache
    def projection():
        return torch.randn(CLASSES)

    return lambda batch: (net(batch.data[0]) @ projection()).square().mean()


LASTING = [
    (in_global, "OLD"),
    (in_closure, "old"),
    (in_its_own_attribute, "function.old"),
    (in_a_counter_of_its_own, "function.calls"),
    (in_a_class, "Config.old"),
    (in_a_counter_of_a_class, "Config.calls"),
    (in_a_default, "a default argument['old']"),
    (in_a_cache, "old"),
    (in_a_bounded_cache, "scale"),
    (in_a_cache_of_random_numbers, "projection"),
]


@pytest.mark.parametrize(("make", "name"), LASTING)
def test_it_is_refused_wherever_it_is_kept(make, name):
    """A global, a closure, an attribute of a function or of a class, a default argument, the cache
    of functools.
    """
    global OLD
    OLD, Config.old, Config.calls = None, None, 0
    assert first_step(ALONE, make).startswith(f"step 1: {name} ")


def test_what_is_made_of_the_first_weights_is_refused_with_advice():
    said = first_step(ALONE, in_closure)
    assert "keeps what the function given to step.mean_loss or step.sum made of the weights" in said
    assert "a worker that resumes" in said and "before the loop" in said


def makes_caches(net):
    """What depends on sizes, on the data set or on frozen weights alone, and outputs."""
    features, sizes, frozen = tensors()[0], {}, nn.Linear(6, 6).requires_grad_(requires_grad=False)
    kept = SimpleNamespace(mask=None, features=None, buffer=None, outputs=None, net=None, view=None)

    @functools.cache
    def positions(size):
        return torch.arange(size) / size

    @functools.lru_cache(maxsize=8)
    def sample(index):
        return float(features[index].sum())

    def function(batch):
        x = batch.data[0]
        if kept.mask is None:
            kept.mask = torch.ones(len(x), 1)
            kept.features = frozen(features)
            kept.buffer = torch.zeros(CLASSES)
            kept.outputs = {}
            kept.net = SimpleNamespace(net=net, features=features)
            kept.view = net[0].weight.view(-1)
        sizes.setdefault(len(x), np.arange(len(x)))
        y = net(x * kept.mask) + positions(len(x))[:, None]
        kept.buffer.copy_(y.detach().mean(0))
        kept.outputs["y"] = y
        kept.outputs["best"] = int(y[0].argmax())
        return F.cross_entropy(y, batch.data[1]) + 0.0 * sum(map(sample, batch.indices.tolist()))

    return function


@pytest.mark.parametrize("shards", [1, 6])
def test_caches_and_outputs_that_the_first_call_makes_are_allowed(shards):
    """Masks by size, features of frozen layers, a cache of what samples hold; dicts of outputs."""
    assert first_step(ALONE, makes_caches, shards) == ""
    assert SAMPLES % shards == 0
