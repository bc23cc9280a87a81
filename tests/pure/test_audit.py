"""An audit finds what is not exact, blames the right side, and leaves training as it was."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from steps import ALONE, CLASSES, Noisy, loss_of, steps
from torch import nn

from elastic.errors import MachineFault, RecipeNotExact
from elastic.proof.audit import StepAudit
from elastic.train.loop.loop import Loop
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

RETURNED = "what call 1 of the step returned"


def begun(member, net, shards=6, **options):
    """The net, its optimizer, and the steps of a State of both, each of which is audited."""
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    state = State(net=net, optimizer=optimizer)
    return optimizer, steps(member, state, **{"shards": shards, "audits": StepAudit} | options)


def seeded(make):
    torch.manual_seed(0)
    return make()


def plain_net():
    return nn.Sequential(
        nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, CLASSES)
    )


def collate_texts(samples):
    """Beside what is trained, texts as an array of objects, and a sparse tensor."""
    x, y = torch.utils.data.default_collate(samples)
    return x, y, np.array([f"text {int(each)}" for each in y], dtype=object), x.to_sparse()


@pytest.mark.parametrize(("collate", "workers"), [(None, 1), (collate_texts, 0)])
def test_what_is_loaded_elsewhere_is_loaded_again_alike(collate, workers):
    """The audited shard is loaded in the training process, also where another process loaded it for
    the training; its augmentation is keyed by sample. Texts lie at other addresses each time they
    are loaded, and sparse tensors cannot be reshaped.
    """
    found = []
    for options in ({"workers": workers}, {"audits": None}):
        net = seeded(plain_net)
        optimizer, coming = begun(ALONE, net, dataset=Noisy(), collate=collate, **options)
        for step in coming:
            step.mean_loss(loss_of(net))
            optimizer.step()
        found.append(checksum_of(State(net=net, optimizer=optimizer).flatten()).whole)
    assert found[0] == found[1]


@pytest.mark.parametrize(("outcome", "num_compared"), [(None, 1), ("of the first loss", 0)])
def test_no_state_in_the_middle_of_a_step_is_compared(outcome, num_compared):
    """After its first loss an optimizer may have updated some of what the last step left."""
    open_step, agreement = SimpleNamespace(outcome=outcome), Mock()
    loop = SimpleNamespace(step=open_step, _agreement=agreement, _of_steps=Mock(), _line=Mock())
    Loop._compare_states(loop)
    assert agreement.compare_anew.call_count == num_compared


def test_a_sum_that_a_later_loss_ended_is_compared_once():
    """It was for the metrics alone, and the step goes on with another sum and its backward."""
    net = seeded(plain_net)
    optimizer, coming = begun(ALONE, net)
    for step in coming:
        step.sum(loss_of(net))
        step.mean_loss(loss_of(net))
        optimizer.step()
        step.backward(step.sum(loss_of(net)))
        optimizer.step()


# Recipes that are not exact.


class Counting(nn.Linear):
    """A temperature that falls from call to call, or is high at the very first one alone."""

    def __init__(self, *, falls=True):
        super().__init__(6, CLASSES)
        self.calls, self.falls = 0, falls

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls if self.falls else 1 + (self.calls == 1))


def fails(member, kind):
    """What a rank raises at the first audit, and what rank 0 records."""
    dataset = Noisy(own_draw=np.random.default_rng(0)) if kind == "generator" else None
    net, log = seeded(Counting if kind == "counter" else lambda: nn.Linear(6, CLASSES)), []
    optimizer, coming = begun(member, net, dataset=dataset, log=SimpleNamespace(record=log.append))
    for step in coming:
        try:
            if kind == "own sum":
                step.backward(step.sum(lambda batch: net(batch.data[0]).sum() * (1 + member.rank)))
            else:
                step.mean_loss(loss_of(net))
        except RecipeNotExact as error:
            return [step.number, str(error), [(e.step, e.ranks, e.entry, e.verdict, e.culprit) for e in log]]
        optimizer.step()
    return None


@pytest.mark.parametrize(
    ("kind", "world_size", "first", "advice"),
    [
        ("counter", 2, RETURNED, "a counter (use step.number)"),
        ("counter", 1, RETURNED, "a queue or momentum update"),
        ("generator", 1, "the data of the shard", "keep nothing between calls"),
        ("own sum", 2, RETURNED, "by run.rank"),
    ],
)
def test_a_recipe_that_remembers_is_named_in_the_first_step(ranks, kind, world_size, first, advice):
    """All ranks agree on the result, or there is one rank alone: no comparison of states would find
    it. Every rank must raise the same, or some would wait for the others.
    """
    found = ranks.run(world_size, fails, kind)
    (number, text, events), *_ = found
    assert number == 1
    assert f"the first that differs is {first}" in text and advice in text
    assert [each[:2] for each in found] == [[number, text]] * world_size
    assert {tuple(each[2:]) for each in events} == {(first, "recipe", None)}


def test_a_redo_that_fails_again_is_the_recipe():
    """A layer that does something else at its very first call: three of four computations agree,
    and after a restart it is at its first call again.
    """

    def first_step(redo):
        _, coming = begun(ALONE, net := seeded(lambda: Counting(falls=False)), shards=1, redo=redo)
        next(coming).mean_loss(loss_of(net))

    with pytest.raises(MachineFault) as first:
        first_step(None)
    with pytest.raises(RecipeNotExact):
        first_step(first.value.divergence)


# Machines that err once.


def flip(tensor):
    tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def errs(member, where, who, shards):
    """One bit of one computation of the last rank is flipped in step 2; what a rank raises.

    gradient: in its own memory, after backward and before the sum.
    """
    net, is_last, now = seeded(plain_net), member.rank == member.world_size - 1, []
    optimizer, coming = begun(member, net, shards)
    for step in coming:
        now[:] = [step]
        own, errs_now = step._parts.exchange.own_shards, is_last and step.number == 2
        gradients, calls = step._parts.gradients, []
        if where == "gradient" and step.number == 1:
            end_block = gradients._end_block

            def flip_and_end(bucket, pair, end_block=end_block):
                if is_last and now[0].number == 2 and now[0].audit.own in pair:
                    flip(bucket.parameters[0].grad)
                end_block(bucket, pair)

            gradients._end_block = flip_and_end

        def function(batch, step=step, calls=calls, own=own, errs_now=errs_now):
            calls.append(batch.shard)
            of_owner = len(calls) <= len(own) and batch.shard == step.audit.own
            of_auditor = len(calls) == len(own) + 1
            loss = loss_of(net)(batch)
            if errs_now and (of_owner if who == "owner" else of_auditor) and where in ("loss", "buffer"):
                flip(loss if where == "loss" else net[1].running_mean)
            return loss

        try:
            step.mean_loss(function)
        except MachineFault as error:
            return [error.divergence.step, error.divergence.entry, list(error.divergence.at_fault)]
        optimizer.step()
    return None


MEAN = "the buffer net.1.running_mean"


@pytest.mark.parametrize(
    ("world_size", "where", "who", "shards", "first"),
    [
        (1, "loss", "owner", 6, RETURNED),
        (1, "buffer", "auditor", 6, MEAN),
        (2, "loss", "auditor", 6, RETURNED),
        (3, "buffer", "owner", 6, MEAN),
        (1, "gradient", "owner", 6, "the gradient of net.4.bias"),
        (2, "gradient", "owner", 2, "the gradient of net.4.bias"),
        (3, "gradient", "owner", 4, "the gradient of net.4.bias"),
    ],
)
def test_one_flipped_bit_is_the_machines_of_its_rank(ranks, world_size, where, who, shards, first):
    """In the training's computation, and in the audit's; the last rank errs. With one shard on a
    rank its gradients are sent while backward still runs; with several they wait for their partner.
    """
    expected = [2, first, [f"node{world_size - 1}"]]
    assert ranks.run(world_size, errs, where, who, shards) == [expected] * world_size
