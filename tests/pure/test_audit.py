"""An audit finds what is not exact, blames the right side, and leaves training as it was."""

import itertools
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from audited import ALONE, BATCH, CLASSES, SAMPLES, Training, tensors
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from elastic.errors import MachineFault, RecipeNotExact, StatesDiffer
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def classify(net, batch):
    return F.cross_entropy(net(batch.data[0]), batch.data[1])


def plain_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, CLASSES)
    )


# Exact recipes: each trains to its end and returns (objects of the state, numbers that it drew).


def mean_recipe(training_of):
    """BatchNorm, Dropout, AdamW, and draws of the recipe's own between the calls."""
    net = plain_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    objects, drawn = {"net": net, "optimizer": optimizer}, []
    for step in training_of(objects).steps():
        drawn.append(float(torch.rand(())))
        step.mean_loss(lambda batch: classify(net, batch))
        drawn += [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
        drawn.append(float(net[0].weight.grad.sum()))
        optimizer.step()
    return objects, drawn


def sum_recipe(training_of):
    """Two sums, a late variable of the loop, a penalty, a sum for the metrics, checkpointing."""
    net = plain_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    objects, drawn = {"net": net, "optimizer": optimizer}, []
    for step in training_of(objects).steps():
        totals = []
        for scale in (1.0, 2.0):
            function = lambda batch: (  # noqa: E731
                scale * checkpoint(net, batch.data[0], use_reentrant=False).double().square().sum(0)  # noqa: B023
                + torch.rand(CLASSES)
                + batch.uniform(1).sum()
            )
            totals.append(step.sum(function))
            drawn.append(float(torch.rand(())))
        step.sum(
            lambda batch: (net(batch.data[0]).argmax(1) == batch.data[1]).double().sum().requires_grad_()
        )
        loss = sum((total / BATCH).square().mean() for total in totals) + net[0].weight.square().sum()
        step.backward(loss)
        drawn += [float(torch.rand(())), float(net[0].weight.grad.sum())]
        optimizer.step()
    return objects, drawn


def adversarial_recipe(training_of):
    """Two models that take turns, three computations a step, one network frozen in each."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 6))
    judge = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 9)), nn.ReLU(), nn.Linear(9, 1)
    )
    makers, judges = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (maker, judge))
    objects = {"maker": maker, "judge": judge, "makers": makers, "judges": judges}

    def judged(batch):
        fake = maker(torch.randn(len(batch.indices), 4)).detach()
        return F.softplus(-judge(batch.data[0])).mean() + F.softplus(judge(fake)).mean()

    def made(batch):
        return F.softplus(-judge(maker(torch.randn(len(batch.indices), 4)))).mean()

    for step in training_of(objects).steps():
        judge.requires_grad_(True)
        for _ in range(2):
            step.mean_loss(judged)
            judges.step()
            judges.zero_grad()
        judge.requires_grad_(False)
        step.mean_loss(made)
        makers.step()
        makers.zero_grad()
    return objects, []


def closure_recipe(training_of):
    """LBFGS calls the loss as often as it likes, with other parameters each time."""
    torch.manual_seed(0)
    net = nn.Linear(6, CLASSES)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    objects, losses = {"net": net, "optimizer": optimizer}, []
    for step in training_of(objects).steps():

        def closure(step=step):
            optimizer.zero_grad()
            return torch.tensor(step.mean_loss(lambda batch: classify(net, batch)))

        losses.append(float(optimizer.step(closure)))
    return objects, losses


def centred_recipe(training_of):
    """Between a sum and the loss it moves a centre that both use: in place, or by assignment."""
    net = plain_net()
    net.register_buffer("center", torch.zeros(6))
    net.register_buffer("scale", torch.ones(6))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    objects, drawn = {"net": net, "optimizer": optimizer}, []

    def centred(batch):
        return (batch.data[0] - net.center) / net.scale

    for step in training_of(objects).steps():
        mean = step.sum(lambda batch: centred(batch).double().sum(0)).float() / BATCH
        net.center.add_(mean, alpha=0.1)
        net.scale = net.scale + mean.square()
        step.sum(lambda batch: centred(batch).square().sum(0))
        step.mean_loss(lambda batch: F.cross_entropy(net(centred(batch)), batch.data[1]))
        optimizer.step()
        drawn += [float(net.center.sum()), float(net.scale.sum())]
    assert net.center.any() and (net.scale != 1).all()
    return objects, drawn


def scaled_recipe(training_of):
    """bfloat16 autocast around the call, a GradScaler, and a loss that overflows in one shard."""
    net = plain_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    objects, scales = {"net": net, "optimizer": optimizer, "scaler": scaler}, []
    for step in training_of(objects).steps():

        def loss(batch, number=step.number):
            return classify(net, batch) * (1e38 if number == 2 and batch.shard == 1 else 1)

        with torch.autocast("cpu", torch.bfloat16):
            step.mean_loss(loss, scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return objects, scales


class Reassigning(nn.Linear):
    """A moving average that forward assigns, and a mask in the largest size so far."""

    def __init__(self):
        super().__init__(6, CLASSES)
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x):
        y = super().forward(x)
        if self.mask is None or len(self.mask) < len(x):
            self.mask = torch.ones(len(x), 1)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean) * self.mask[: len(x)]


def reassigning_recipe(training_of):
    """And a penalty whose backward the recipe calls itself."""
    torch.manual_seed(0)
    net = Reassigning()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    objects = {"net": net, "optimizer": optimizer}
    for step in training_of(objects).steps():
        step.mean_loss(lambda batch: classify(net, batch))
        (1e-2 * net.weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return objects, []


class Augmented(Dataset):
    """Draws from the global generators, which are keyed for each sample."""

    def __init__(self):
        self.x, self.y = tensors()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6) + random.random() + np.random.rand()  # noqa: NPY002
        return self.x[index] + noise, self.y[index]


EXACT = {
    "mean": mean_recipe,
    "sum": sum_recipe,
    "adversarial": adversarial_recipe,
    "closure": closure_recipe,
    "centred": centred_recipe,
    "scaled": scaled_recipe,
    "reassigning": reassigning_recipe,
}


def train_exactly(member, name, audits, workers):
    torch.set_num_threads(1)
    made = []

    def training_of(objects):
        dataset = Augmented() if workers is not None else None
        made.append(Training(member, objects, audits=audits, dataset=dataset, workers=workers or 0))
        return made[0]

    objects, drawn = EXACT[name](training_of)
    return [checksum_of(State(**objects).flatten()).whole, [number.hex() for number in drawn]]


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_recipe_passes_and_is_not_disturbed(ranks, name):
    """An audit of every computation, against no audit: what is left over of one (a stream that went
    on, a buffer, a gradient) would change the digest, or the numbers that the recipe draws itself.
    """
    undisturbed = train_exactly(ALONE, name, False, None)
    for world_size in (1, 2, 3):
        assert ranks.run(world_size, train_exactly, name, True, None) == [undisturbed] * world_size


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_loaded_elsewhere_is_loaded_again_alike(workers):
    """The audited shard is loaded in the training process, also where another process loaded it for
    the training; its augmentation is keyed by sample.
    """
    undisturbed = train_exactly(ALONE, "mean", False, 0)
    assert train_exactly(ALONE, "mean", True, workers) == undisturbed


def collate_texts(samples):
    """Beside what is trained, texts as an array of objects, and a sparse tensor."""
    x, y = torch.utils.data.default_collate(samples)
    return x, y, np.array([f"text {int(each)}" for each in y], dtype=object), x.to_sparse()


def train_beside_texts(audits, collate):
    net = nn.Linear(6, CLASSES)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    objects = {"net": net, "optimizer": optimizer}
    training = Training(ALONE, objects, audits=audits, dataset=Augmented(), collate=collate)
    for step in training.steps():
        step.mean_loss(lambda batch: classify(net, batch))
        optimizer.step()
    return checksum_of(State(**objects).flatten()).whole


def test_texts_and_sparse_tensors_in_a_batch_pass_an_audit():
    """The first lie at other addresses each time they are loaded, the second cannot be reshaped."""
    assert train_beside_texts(True, collate_texts) == train_beside_texts(False, collate_texts)


def test_a_text_that_depends_on_the_past_is_found_by_an_audit():
    count = itertools.count()
    with pytest.raises(RecipeNotExact, match="The data set, or collate"):
        train_beside_texts(True, lambda samples: (*collate_texts(samples), texts_of(next(count))))


def texts_of(number):
    return np.array([f"number {number}"], dtype=object)


# Recipes that are not exact.


class Counting(nn.Linear):
    """A temperature that falls from call to call."""

    def __init__(self):
        super().__init__(6, CLASSES)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Queue(nn.Linear):
    """A memory bank in a plain attribute, as MoCo's queue would be without register_buffer."""

    def __init__(self):
        super().__init__(6, CLASSES)
        self.queue = torch.zeros(BATCH, CLASSES)

    def forward(self, x):
        y = super().forward(x)
        self.queue = torch.cat([y.detach(), self.queue])[:BATCH]
        return y @ self.queue.T @ self.queue


class ActNorm(nn.Linear):
    """Scaled by the statistics of the first data that this process sees."""

    def __init__(self):
        super().__init__(6, CLASSES)
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = 1 / x.detach().std()
        return super().forward(x * self.scale)


class OwnGenerator(Augmented):
    def __init__(self):
        super().__init__()
        self.draw = np.random.default_rng(0)

    def __getitem__(self, index):
        return self.x[index] + self.draw.random(dtype=np.float32), self.y[index]


def fails(member, kind):
    """What a rank raises at the first audit, and what rank 0 records."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = OwnGenerator() if kind == "generator" else None
    net = {"counter": Counting, "queue": Queue, "actnorm": ActNorm}.get(
        kind, partial(nn.Linear, 6, CLASSES)
    )()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    training = Training(member, {"net": net, "optimizer": optimizer}, dataset=dataset)
    for step in training.steps():
        try:
            if kind == "own sum":
                total = step.sum(lambda batch: net(batch.data[0]).sum() * (1 + member.rank))
                step.backward(total)
            else:
                step.mean_loss(lambda batch: classify(net, batch))
        except RecipeNotExact as error:
            events = [(e.step, e.ranks, e.entry, e.verdict, e.culprit) for e in training.log.events]
            return [step.number, str(error), events]
        optimizer.step()
    return None


@pytest.mark.parametrize(
    ("kind", "world_size", "first", "advice"),
    [
        ("counter", 2, "what call 1 of the step returned", "a counter in a forward"),
        ("queue", 1, "what call 1 of the step returned", "a queue or a momentum update"),
        ("generator", 1, "the data of the shard", "leave nothing behind there"),
        ("actnorm", 2, "what call 1 of the step returned", "an initialisation by the first data"),
        ("own sum", 2, "what call 1 of the step returned", "the recipe's use of run.rank"),
    ],
)
def test_a_recipe_that_remembers_is_named_in_the_first_step(ranks, kind, world_size, first, advice):
    """All ranks agree on the result, or there is one rank alone: no comparison of states would find
    it. Every rank must raise the same, or some would wait for the others.
    """
    found = ranks.run(world_size, fails, kind)
    (number, text, events), *_ = found
    assert number == 1
    assert f"the first that differs is {first}" in text
    assert advice in text
    assert [each[:2] for each in found] == [[number, text]] * world_size
    assert {tuple(each[2:]) for each in events} == {(first, "recipe", None)}


class Momentum(nn.Module):
    """MoCo's encoders as published: the second one follows the first inside forward."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.follows = False

    def forward(self, x):
        if self.follows:
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.data.mul_(0.9).add_(query.data, alpha=0.1)
        return self.query(x) * self.key(x)


def test_weights_that_a_forward_moves_past_autograds_count_are_found_in_any_step():
    """What a forward does to parameters is compared in the first step of a process; in later ones
    a write through .data is seen by its effect alone. The warm-up here ends after step 1.
    """
    torch.manual_seed(0)
    net = Momentum()
    optimizer = torch.optim.SGD(net.query.parameters(), lr=1e-2)
    steps = Training(ALONE, {"net": net, "optimizer": optimizer}).steps()
    next(steps).mean_loss(lambda batch: net(batch.data[0]).square().mean())
    optimizer.step()
    net.follows = True
    with pytest.raises(RecipeNotExact, match="a queue or a momentum update"):
        next(steps).mean_loss(lambda batch: net(batch.data[0]).square().mean())


# Machines that err once.


def flip(tensor):
    tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def errs(member, who, where, world_size):
    """One bit of one computation on one rank is flipped in step 2; what the rank raises."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    training = Training(member, {"net": net, "optimizer": optimizer})
    own_shards = training.parts.exchange.own_shards
    for step in training.steps():
        calls = []

        def function(batch, step=step, calls=calls):
            calls.append(batch.shard)
            of_owner = len(calls) <= len(own_shards) and batch.shard == step.audit.own
            of_auditor = len(calls) == len(own_shards) + 1
            loss = classify(net, batch)
            errs_now = of_owner if who == "owner" else of_auditor
            if errs_now and step.number == 2 and member.rank == world_size - 1:
                flip(loss if where == "loss" else net[1].running_mean)
            return loss

        try:
            step.mean_loss(function)
        except MachineFault as error:
            return [error.divergence.step, error.divergence.entry, list(error.divergence.at_fault)]
        optimizer.step()
    return None


@pytest.mark.parametrize("who", ["owner", "auditor"])
@pytest.mark.parametrize("where", ["loss", "buffer"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_flipped_bit_is_the_machines_of_the_rank_where_it_flipped(ranks, world_size, who, where):
    """In the training's computation, and in the audit's; the last rank errs."""
    first = "what call 1 of the step returned" if where == "loss" else "the buffer net.1.running_mean"
    expected = [2, first, [f"node{world_size - 1}"]]
    assert ranks.run(world_size, errs, who, where, world_size) == [expected] * world_size


def has_diverged(member):
    """A weight of the last rank is another one before step 2; what a rank raises in that step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = plain_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in Training(member, {"net": net, "optimizer": optimizer}).steps():
        try:
            step.mean_loss(lambda batch: classify(net, batch))
        except (MachineFault, RecipeNotExact, StatesDiffer) as error:
            return type(error).__name__
        optimizer.step()
        if member.rank == 1:
            net[0].weight.data.mul_(1.5)
    return "nothing"


def test_ranks_whose_states_differ_already_are_told_that_and_no_recipe_is_blamed(ranks):
    """Each rank repeats its own result, as with a recipe that depends on the rank."""
    assert ranks.run(2, has_diverged) == ["StatesDiffer", "StatesDiffer"]


def flips_a_vector(member, shards, world_size):
    """As a bit that flips in the gradient's own memory, after backward and before the sum."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    training = Training(member, {"net": net, "optimizer": optimizer}, shards=shards)
    send = training.parts.gradients._end_pair

    def flip_and_send(bucket, pair):
        if step.number == 2 and member.rank == world_size - 1 and step.audit.own in pair:
            flip(bucket._flat)
        send(bucket, pair)

    training.parts.gradients._end_pair = flip_and_send
    for step in training.steps():
        try:
            step.mean_loss(lambda batch: classify(net, batch))
        except MachineFault as error:
            return [step.number, error.divergence.entry, list(error.divergence.at_fault)]
        optimizer.step()
    return None


@pytest.mark.parametrize(("world_size", "shards"), [(1, 1), (1, 6), (2, 2), (2, 6), (3, 4)])
def test_a_bit_that_flips_in_a_gradient_before_the_sum_is_found(ranks, world_size, shards):
    """With one shard on a rank its vector is sent while backward still runs; with several it waits
    for its partner.
    """
    expected = [2, "the gradient of net.bias", [f"node{world_size - 1}"]]
    assert ranks.run(world_size, flips_a_vector, shards, world_size) == [expected] * world_size


def test_a_redo_that_fails_again_is_the_recipe():
    """A layer that does something else at its very first call: three of four computations agree,
    and after a restart it is at its first call again.
    """

    class Cold(nn.Linear):
        is_warm = False

        def forward(self, x):
            y = super().forward(x)
            if not self.is_warm:
                self.is_warm, y = True, y * 2
            return y

    def first_step(redo):
        torch.manual_seed(0)
        training = Training(ALONE, {"net": (net := Cold(6, CLASSES))}, shards=1)
        training.auditor = replace(training.auditor, link=replace(training.auditor.link, divergence=redo))
        next(training.steps()).mean_loss(lambda batch: classify(net, batch))

    with pytest.raises(MachineFault) as first:
        first_step(None)
    with pytest.raises(RecipeNotExact):
        first_step(first.value.divergence)
