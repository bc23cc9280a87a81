"""An audit finds what is not exact, blames the right side, and leaves training as it was."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from steps import ALONE, BATCH, CLASSES, CPU, NO_REQUESTS, SAMPLES, auditor_of, parts_of, samples
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import Dataset

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import MachineFault, RecipeNotExact, StatesDiffer
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State
from elastic.train.step.step import Step


class Log:
    """Keeps the events that rank 0 records."""

    def __init__(self):
        self.events = []

    def record(self, event):
        self.events.append(event)


class Training:
    """The trainer's loop without restores, snapshots and saves.

    audits: every step is audited.
    """

    def __init__(
        self,
        member,
        objects,
        *,
        shards=6,
        dataset=None,
        collate=None,
        workers=0,
        audits=True,
    ):
        order = SampleOrder(
            seed=5, samples=SAMPLES, global_batch=BATCH, shards=shards, epochs=3, tail=Tail.PAD
        )
        state = State(**objects)
        self.parts = parts_of(state, order, member)
        self.loader = Loader(
            dataset=samples() if dataset is None else dataset,
            order=order,
            device=CPU,
            workers=workers,
            collate=collate,
        )
        self.log = Log()
        self.auditor = auditor_of(
            state,
            self.parts,
            self.loader,
            member=member,
            compare=self.compare,
            log=None if member.rank else self.log,
        )
        self.audits = audits

    def compare(self):
        """As the loop does: raise if the ranks' states differed before the step."""
        self.parts.buffers.load()
        states = self.auditor.groups.all_gather(checksum_of(self.auditor.state.flatten()).whole)
        if len(set(states)) > 1:
            raise StatesDiffer("the states differed before", None)

    def steps(self):
        batches = self.loader.steps(self.parts.exchange.own_shards, 1)
        for number in range(1, self.parts.order.steps + 1):
            auditor = self.auditor if self.audits else None
            yield Step(number, self.parts, partial(next, batches), lambda _number: NO_REQUESTS, auditor)
        self.parts.gradients.close()


def classify(net, batch):
    return F.cross_entropy(net(batch.data[0]), batch.data[1])


def plain_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, CLASSES)
    )


class Augmented(Dataset):
    """Draws from the global generators, which are keyed for each sample."""

    def __init__(self):
        self.x, self.y = samples().tensors

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(6) + random.random() + np.random.rand()  # noqa: NPY002
        return self.x[index] + noise, self.y[index]


def collate_texts(samples):
    """Beside what is trained, texts as an array of objects, and a sparse tensor."""
    x, y = torch.utils.data.default_collate(samples)
    return x, y, np.array([f"text {int(each)}" for each in y], dtype=object), x.to_sparse()


def train_exactly(audits, collate, workers):
    net = plain_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    objects = {"net": net, "optimizer": optimizer}
    training = Training(ALONE, objects, audits=audits, dataset=Augmented(), collate=collate, workers=workers)
    for step in training.steps():
        step.mean_loss(lambda batch: classify(net, batch))
        optimizer.step()
    return checksum_of(State(**objects).flatten()).whole


@pytest.mark.parametrize(("collate", "workers"), [(None, 1), (collate_texts, 0)])
def test_what_is_loaded_elsewhere_is_loaded_again_alike(collate, workers):
    """The audited shard is loaded in the training process, also where another process loaded it for
    the training; its augmentation is keyed by sample. Texts lie at other addresses each time they
    are loaded, and sparse tensors cannot be reshaped.
    """
    assert train_exactly(True, collate, workers) == train_exactly(False, collate, 0)


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
        ("counter", 2, "what call 1 of the step returned", "a counter (use step.number)"),
        ("queue", 1, "what call 1 of the step returned", "a queue or momentum update"),
        ("generator", 1, "the data of the shard", "keep nothing between calls"),
        ("actnorm", 2, "what call 1 of the step returned", "an initialisation from a rank's first data"),
        ("own sum", 2, "what call 1 of the step returned", "by run.rank"),
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
    with pytest.raises(RecipeNotExact, match="a queue or momentum update"):
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


@pytest.mark.parametrize(
    ("world_size", "who", "where"),
    [(1, "owner", "loss"), (1, "auditor", "buffer"), (2, "auditor", "loss"), (3, "owner", "buffer")],
)
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


@pytest.mark.parametrize(("world_size", "shards"), [(1, 6), (2, 2), (3, 4)])
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
