"""What the recipe's function leaves behind outside its result is refused, or belongs there."""

import random
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from audited import ALONE, BATCH, CLASSES, SAMPLES, Training, tensors
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import TensorDataset

from elastic.errors import UsageError
from elastic.train.flat_state import checksum_of
from elastic.train.reachable import sites_of
from elastic.train.site import note, put_back
from elastic.train.state import State
from elastic.train.values import Values

CALLS, SHARED = 0, {}


class Net(nn.Module):
    """kind: what its forward leaves behind."""

    calls_of_class = 0

    def __init__(self, kind):
        super().__init__()
        self.body = nn.Linear(6, CLASSES)
        self.kind, self.calls, self.history, self.recent = kind, 0, [], deque(maxlen=3)
        self.usage, self.bank = torch.zeros(CLASSES), torch.zeros(SAMPLES, CLASSES)
        self.scale = self.hidden = self.mask = self.last = self.last_size = None
        self.by_size, self.named = {}, {}

    def forward(self, x, indices):
        y = self.body(x)
        match self.kind:
            case "count":
                self.calls += 1
            case "count of the class":
                type(self).calls_of_class += 1
            case "sum":
                self.usage += y.detach().softmax(1).sum(0)
            case "new sum":
                self.usage = self.usage + y.detach().softmax(1).sum(0)
            case "list":
                self.history.append(float(y.detach().sum()))
            case "deque":
                self.recent.append(float(y.detach().sum()))
            case "hidden":
                self.hidden = (
                    y.detach().mean(0) if self.hidden is None else 0.5 * self.hidden + y.detach().mean(0)
                )
            case "bank":
                self.bank[indices] = y.detach()
            case "first data":
                self.scale = 1 / x.std() if self.scale is None else self.scale
            case "first number":
                self.scale = float(x.std()) if self.scale is None else self.scale
            case "output":
                self.last, self.last_size = y, float(y.detach().sum())
                self.named["y"] = y
                self.history = [y, y + 1]
            case "output in place":
                self.usage.copy_(y.detach().mean(0))
            case "cache":
                if self.mask is None or len(self.mask) < len(x):
                    self.mask = torch.ones(len(x), 1)
                self.by_size.setdefault(len(x), torch.arange(len(x)))
        return y


def loss(net, batch):
    return F.cross_entropy(net(batch.data[0], batch.indices), batch.data[1])


def training(member, net, *, shards=6, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return optimizer, Training(
        member, {"net": net, "optimizer": optimizer}, shards=shards, looks=True, **options
    )


def first_step(member, kind, shards=6):
    """The sentence that the first step ends with."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net(kind)
    _, loop = training(member, net, audits=False, shards=shards)
    step = next(loop.steps())
    try:
        step.mean_loss(lambda batch: loss(net, batch))
    except UsageError as error:
        return str(error)
    return ""


MEMORY, STORE = "changes with each call of", "by each worker with its own shards only"
FIRST = "found in the first shard that this worker computed"
REFUSED = [
    ("count", "step 1: net.calls " + MEMORY),
    ("count of the class", "step 1: Net.calls_of_class " + MEMORY),
    ("sum", "step 1: net.usage " + MEMORY),
    ("new sum", "step 1: net.usage " + MEMORY),
    ("list", "step 1: net.history " + MEMORY),
    ("deque", "step 1: net.recent " + MEMORY),
    ("hidden", "step 1: net.hidden " + MEMORY),
    ("bank", "step 1: net.bank is filled"),
    ("first data", "step 1: net.scale keeps what"),
    ("first number", "step 1: net.scale keeps what"),
]


@pytest.mark.parametrize(("kind", "said"), REFUSED)
def test_a_forward_with_a_memory_is_refused_in_the_first_step(kind, said):
    """By one worker alone, which has nothing to compare with: at two workers each would count half
    as many calls, and sum half of the samples.
    """
    assert first_step(ALONE, kind).startswith(said)


@pytest.mark.parametrize("kind", ["count", "bank", "first data"])
def test_it_is_refused_by_each_of_several_workers(ranks, kind):
    """Also where a worker has one shard: another one's is computed beside it."""
    said = dict(REFUSED)[kind]
    for world_size, shards in ((2, 6), (3, 3)):
        found = ranks.run(world_size, first_step, kind, shards)
        assert all(said in each for each in found)


@pytest.mark.parametrize("kind", ["", "output", "output in place", "cache"])
def test_outputs_and_caches_of_a_forward_are_allowed(kind):
    """What each call replaces, and what depends on the sizes alone."""
    assert first_step(ALONE, kind) == ""


class Trainer:
    """A recipe in a class; it holds what the functions below fill."""

    def __init__(self, net):
        self.net, self.seen, self.total = net, 0, 0.0
        self.priorities = np.zeros(SAMPLES)

    def counting(self, batch):
        self.seen += len(batch.indices)
        return loss(self.net, batch)

    def filling(self, batch):
        self.priorities[batch.indices.numpy()] = 1.0
        return loss(self.net, batch)


def functions(net):
    """By name: a function, and the name of what it leaves behind."""
    priorities, errors, seen, log, meter = np.zeros(SAMPLES), torch.zeros(SAMPLES), {}, [], Values(total=0.0)
    members, table = set(), [None] * SAMPLES
    calls, draw, torch_draw, numpy_draw = 0, random.Random(0), torch.Generator(), np.random.default_rng(0)
    teacher = nn.BatchNorm1d(6)
    trainer = Trainer(net)

    def array(batch):
        priorities[batch.indices.numpy()] = 1.0
        return loss(net, batch)

    def tensor(batch):
        errors[batch.indices] = 1.0
        return loss(net, batch)

    def mapping(batch):
        seen.update({int(index): float(index) for index in batch.indices})
        return loss(net, batch)

    def items(batch):
        for index in batch.indices:
            table[index] = float(index)
        return loss(net, batch)

    def members_of(batch):
        members.update(batch.indices.tolist())
        return loss(net, batch)

    def appending(batch):
        log.append(float(len(batch.indices)))
        return loss(net, batch)

    def counting(batch):
        nonlocal calls
        calls += 1
        return loss(net, batch)

    def counting_globally(batch):
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return loss(net, batch)

    def filling_globally(batch):
        write_globally(batch)
        return loss(net, batch)

    def metering(batch):
        meter.total += float(len(batch.indices))
        return loss(net, batch)

    def drawing(batch):
        return loss(net, batch) * draw.random()

    def drawing_of_torch(batch):
        return loss(net, batch) * torch.rand((), generator=torch_draw)

    def drawing_of_numpy(batch):
        return loss(net, batch) * numpy_draw.random()

    def teaching(batch):
        return loss(net, batch) + 0 * teacher(batch.data[0]).sum()

    return {
        "array": (array, "priorities is filled"),
        "tensor": (tensor, "errors is filled"),
        "mapping": (mapping, "seen is filled"),
        "items": (items, "table is filled"),
        "set": (members_of, "members is filled"),
        "list": (appending, "log changes"),
        "nonlocal": (counting, "calls changes"),
        "global": (counting_globally, "CALLS changes"),
        "helper": (filling_globally, "SHARED is filled"),
        "values": (metering, "meter.total changes"),
        "partial": (partial(loss_and_count, trainer), "seen changes"),
        "bound count": (trainer.counting, "Trainer.seen changes"),
        "bound array": (trainer.filling, "Trainer.priorities is filled"),
        "random": (drawing, "draws from draw, a generator of its own"),
        "torch generator": (drawing_of_torch, "draws from torch_draw, a generator of its own"),
        "numpy generator": (drawing_of_numpy, "draws from numpy_draw, a generator of its own"),
        "module outside": (teaching, "teacher.running_mean changes"),
    }


def write_globally(batch):
    SHARED.update({int(index): float(index) for index in batch.indices})


def loss_and_count(trainer, batch):
    return trainer.counting(batch)


@pytest.mark.parametrize("name", list(functions(None)))
def test_what_a_function_leaves_in_its_surroundings_is_refused(name):
    """Its closure, globals, bound object and arguments, also through functions that it calls."""
    SHARED.clear()
    net = Net("")
    function, said = functions(net)[name]
    _, loop = training(ALONE, net, audits=False)
    with pytest.raises(UsageError) as refused:
        next(loop.steps()).mean_loss(function)
    assert said in str(refused.value)


def test_a_function_that_a_later_step_calls_first_is_looked_at_in_its_audit():
    """A regulariser from the second epoch on, say."""
    net = Net("")
    optimizer, loop = training(ALONE, net)
    counts = []
    coming = loop.steps()
    next(coming).mean_loss(lambda batch: loss(net, batch))
    optimizer.step()

    def later(batch):
        counts.append(1)
        return loss(net, batch)

    with pytest.raises(UsageError, match=r"step 2: counts changes"):
        next(coming).mean_loss(later)


def called(function):
    """A decorator without `functools.wraps`: all of its functions have one code."""

    def call(batch):
        return function(batch)

    return call


@pytest.mark.parametrize(
    "wrap",
    [partial, called, torch.enable_grad(), lambda function: function],
    ids=["partial", "closure", "enable_grad", "plain"],
)
@pytest.mark.parametrize("others", ["another function", "another module"])
def test_what_one_function_leaves_behind_is_not_hidden_by_one_like_it_before(wrap, others):
    """Of all partials, and of all functions behind one decorator, only the first was looked at."""
    net, counting = Net(""), Net("count")

    def harmless(batch):
        return loss(net, batch)

    def filling(batch):
        return loss(counting, batch)

    def of(module):
        return lambda batch: loss(module, batch)

    first, second = (harmless, filling) if others == "another function" else (of(net), of(counting))
    optimizer = torch.optim.SGD([*net.parameters(), *counting.parameters()], lr=0.1)
    loop = Training(
        ALONE, {"net": net, "counting": counting, "optimizer": optimizer}, looks=True, audits=False
    )
    step = next(loop.steps())
    step.sum(wrap(first))
    with pytest.raises(UsageError, match=r"counting\.calls changes"):
        step.mean_loss(wrap(second))


@pytest.mark.parametrize(
    "decorated",
    [
        staticmethod(lambda key: SHARED.setdefault(key, key)),
        classmethod(lambda cls, key: SHARED.setdefault(key, key)),
        property(lambda self: SHARED.setdefault(len(SHARED), 1)),
    ],
    ids=["static method", "class method", "property"],
)
def test_what_a_decorated_method_fills_is_refused(decorated):
    """A method that is no plain function was not looked into."""
    SHARED.clear()

    class Holder:
        fill = decorated

    holder, net = Holder(), Net("")

    def function(batch):
        for index in batch.indices.tolist():
            found = holder.fill
            if callable(found):
                found(index)
        return loss(net, batch)

    _, loop = training(ALONE, net, audits=False)
    with pytest.raises(UsageError, match="SHARED"):
        next(loop.steps()).mean_loss(function)


def features(net, batch, found):
    return loss(net, batch) + 0.1 * found["features"].square().mean()


def test_features_that_a_hook_collects_are_an_output():
    """The common way to look into a network: a dict that each forward fills again."""
    net, found = Net(""), {}
    net.body.register_forward_hook(lambda _m, _i, output: found.__setitem__("features", output))
    optimizer, loop = training(ALONE, net)
    for step in loop.steps():
        step.mean_loss(lambda batch: features(net, batch, found))
        optimizer.step()
    assert step.number == 6


def trains(looks, audits, kind="output"):
    """The digest, and what the training's own calls left in attributes."""
    torch.manual_seed(0)
    net = Net(kind)
    net.insert = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"net": net, "optimizer": optimizer}
    for step in Training(ALONE, objects, looks=looks, audits=audits).steps():
        step.mean_loss(
            lambda batch: F.cross_entropy(net(net.insert(batch.data[0]), batch.indices), batch.data[1])
        )
        optimizer.step()
    return checksum_of(State(**objects).flatten()).whole, net


def test_looking_for_side_effects_leaves_the_training_as_it_was():
    """Dropout, BatchNorm's averages, and the attributes that the loop may read."""
    undisturbed, net = trains(looks=False, audits=False)
    for looks, audits in ((True, False), (True, True), (False, True)):
        digest, found = trains(looks, audits)
        assert digest == undisturbed
        assert found.last_size == net.last_size
        assert torch.equal(found.last, net.last)


def test_an_audit_adds_nothing_to_what_forward_counts():
    """Two equal commands are audited at other steps, since audits follow the clock: a usage that
    the loop reads was another one. Functions that were looked at before are such a case, and those
    of a resumed process.
    """
    results = []
    for audits in (False, True):
        torch.manual_seed(0)
        net = Net("sum")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        coming = Training(ALONE, {"net": net, "optimizer": optimizer}, audits=audits).steps()
        next(coming).mean_loss(partial(loss, net))
        results.append(net.usage)
    assert torch.equal(*results)
    assert float(results[0].sum()) == pytest.approx(BATCH)


def test_everything_that_a_function_can_reach_is_put_back():
    """Each kind of place is changed, also by adding and by taking away."""
    net = Net("")
    function, _ = functions(net)["array"]
    places = {
        "list": [1, 2], "deque": deque([1, 2], maxlen=2), "dict": {"b": 1, "a": 2}, "set": {1},
        "array": np.arange(3), "tensor": torch.arange(3.0), "generator": torch.Generator().manual_seed(3),
        "values": Values(best=1.0), "trainer": Trainer(net),
    }  # fmt: skip

    def reaching(batch):
        return places, function(batch)

    sites, calls_of_class = sites_of(State(net=net), [reaching]), Net.calls_of_class
    before = note(sites, copied_bytes=2**20)
    draws = torch.rand(3, generator=places["generator"])
    places["list"].clear()
    places["deque"].append(9)
    del places["dict"]["b"]
    places["set"].add(7)
    places["array"][1] = 8
    places["tensor"][1] = 8
    places["values"].best = 0.0
    places["trainer"].seen = 5
    places["trainer"].late = 6
    places["new"] = 1
    net.calls, net.added = 4, 1
    net.usage.data.add_(1)
    del net.history
    Net.calls_of_class += 3
    put_back(sites, before)
    assert places["list"] == [1, 2]
    assert places["deque"] == deque([1, 2])
    assert list(places["dict"].items()) == [("b", 1), ("a", 2)]
    assert places["set"] == {1}
    assert list(places["array"]) == [0, 1, 2]
    assert torch.equal(places["tensor"], torch.arange(3.0))
    assert torch.equal(torch.rand(3, generator=places["generator"]), draws)
    assert places["values"].best == 1.0
    assert vars(places["trainer"]).keys() == {"net", "seen", "total", "priorities"}
    assert "new" not in places
    assert (net.calls, net.history, Net.calls_of_class) == (0, [], calls_of_class)
    assert not hasattr(net, "added")
    assert not net.usage.any()


def test_no_code_of_the_recipe_runs_when_it_is_looked_at():
    """Properties, comparisons and missing attributes would be such code."""

    class Touchy:
        def __init__(self):
            self.number = 1

        def refuse(self, *_):
            raise AssertionError("was called")

        __eq__ = __getattr__ = __bool__ = __len__ = __repr__ = __iter__ = refuse
        __hash__ = None
        lazy = property(refuse)

    touchy = {"it": Touchy(), "of": (Touchy(), [Touchy()])}

    def reaching(batch):
        return touchy["it"].number, batch

    sites = sites_of(State(net=Net("")), [reaching])
    put_back(sites, note(sites, copied_bytes=0))
    assert any(site.path == "touchy['it']" for site in sites)


def test_a_data_set_in_reach_is_not_blamed_for_being_loaded():
    """It counts what was loaded; the function reads it beside its batch."""

    class Counting(TensorDataset):
        loaded = 0

        def __getitem__(self, index):
            self.loaded += 1
            return super().__getitem__(index)

    dataset, net = Counting(*tensors()), Net("output")
    _, loop = training(ALONE, net, dataset=dataset)
    step = next(loop.steps())
    step.mean_loss(lambda batch: loss(net, batch) + 0 * dataset.tensors[0].sum())
    assert dataset.loaded == SAMPLES // 2


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_numbers_that_each_call_writes_anew_are_refused_with_advice_that_passes(kind):
    """Noise that is drawn into one tensor: the advice was to add it up through step.sum."""
    torch.manual_seed(0)
    net, noise = Net(""), torch.zeros(4, 6) if kind == "tensor" else np.zeros((4, 6), dtype=np.float32)

    def drawing(batch):
        if kind == "tensor":
            noise.normal_()
        else:
            noise[...] = np.random.standard_normal((4, 6))  # noqa: NPY002 - as recipes draw
        x = batch.data[0] + torch.as_tensor(noise)
        return F.cross_entropy(net(x, batch.indices), batch.data[1])

    def advised(batch):
        noise = torch.randn_like(batch.data[0])
        return F.cross_entropy(net(batch.data[0] + noise, batch.indices), batch.data[1])

    _, loop = training(ALONE, net, audits=False)
    with pytest.raises(UsageError, match=r"noise is written anew .* noise = torch\.randn_like\(x\)"):
        next(loop.steps()).mean_loss(drawing)
    _, loop = training(ALONE, net)
    next(loop.steps()).mean_loss(advised)


class Settings:
    """Of a recipe, which its function reads."""

    def __init__(self):
        self.noise, self.seen = 0.1, None


def rate_of_dropout(form):
    net, drop = Net(""), nn.Dropout(0.1)

    def function(batch):
        if form == "set first":
            drop.p = 0.5
        found = F.cross_entropy(drop(net(batch.data[0], batch.indices)), batch.data[1])
        drop.p = 0.1 if form == "put back" else 0.5
        return found

    return net, function, "drop.p"


def mode_of_a_teacher(form):
    net, teacher = Net(""), nn.Sequential(nn.Linear(6, CLASSES), nn.Dropout(0.5))

    def function(batch):
        if form == "set first":
            teacher.eval()
        with torch.no_grad():
            soft = teacher(batch.data[0]).softmax(1)
        teacher.train(form == "put back")
        return F.cross_entropy(net(batch.data[0], batch.indices), soft)

    return net, function, "teacher.0.training, teacher.1.training, teacher.training"


def number_of_an_object(form):
    net, settings = Net(""), Settings()

    def function(batch):
        if form == "set first":
            settings.noise = 0.2
        found = F.cross_entropy(net(batch.data[0] * settings.noise, batch.indices), batch.data[1])
        settings.noise = 0.1 if form == "put back" else 0.2
        return found

    return net, function, "settings.noise"


OWN_CALLS = [rate_of_dropout, mode_of_a_teacher, number_of_an_object]


def own_call(member, index, form):
    """The sentence that the first step ends with, where the body sets it again before each call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, function, _ = OWN_CALLS[index](form)
    _, loop = training(member, net, audits=False)
    try:
        next(loop.steps()).mean_loss(function)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("index", range(len(OWN_CALLS)))
def test_a_setting_that_a_call_leaves_for_the_next_shard_is_refused_in_the_first_step(ranks, index):
    """`drop.p = 0.5` at the function's end, 0.1 in the body: of each worker only the first shard
    was computed with 0.1. With one worker nothing differed, and with two a machine was blamed.
    """
    *_, name = OWN_CALLS[index]("left")
    for said in (own_call(ALONE, index, "left"), *ranks.run(2, own_call, index, "left")):
        assert (
            f"step 1: the function given to step.mean_loss or step.sum reads what its own call for the shard before has left behind, in {name},"
            in said
        )


@pytest.mark.parametrize("form", ["put back", "set first"])
@pytest.mark.parametrize("index", range(len(OWN_CALLS)))
def test_a_setting_that_is_put_back_or_set_before_it_is_read_is_allowed(index, form):
    assert own_call(ALONE, index, form) == ""
