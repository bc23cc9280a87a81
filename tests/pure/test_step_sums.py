"""A sum over shards takes what can be summed, and refuses the rest on every rank."""

import pytest
import torch
from steps import ALONE, BATCH, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
from elastic.observe.step_line import OWN_NAMES
from elastic.train.state.state import State


def net_of():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def step_of(member=ALONE):
    net = net_of()
    return net, next(steps(member, State(net=net)))


def counted(member):
    """Correct answers of each class, and a truth value, beside a loss."""
    net, step = step_of(member)
    total = step.sum(lambda batch: net(batch.data[0]).square().sum())
    hits = step.sum(
        lambda batch: torch.bincount(
            batch.data[1][net(batch.data[0]).argmax(1) == batch.data[1]], minlength=3
        )
    )
    some = step.sum(lambda batch: (net(batch.data[0]) > 0).any())
    huge = step.sum(lambda batch: torch.tensor(2**53 + 1 + batch.shard))
    step.backward(total / BATCH)
    types = {str(tensor.dtype) for tensor in (hits, some, huge)} | {str(hits.requires_grad)}
    return [hits.tolist(), some.item(), huge.item(), sorted(types), net.weight.grad.sum().item().hex()]


def test_whole_numbers_are_summed_exactly_at_every_world_size(ranks):
    """Counting correct answers; above 2^53 a sum in float64 would not be exact."""
    (alone,) = ranks.run(1, counted)
    assert alone[2] == 8 * (2**53 + 1) + sum(range(8))
    assert alone[3] == ["False", "torch.int64"]
    for world_size in (2, 3):
        assert ranks.run(world_size, counted) == [alone] * world_size


@pytest.mark.parametrize("value", [2**60, -(2**60)])
def test_whole_numbers_whose_sum_over_shards_may_not_fit_are_refused(value):
    """Eight shards of 2^60 each, as the sum of large hashes: 2^63 would become -2^63."""
    _, step = step_of()
    with pytest.raises(UsageError, match=rf"step\.sum: .* at most {2**60 - 1} in each part.* found {value};"):
        step.sum(lambda batch: torch.tensor([0, value * (batch.shard == 5)]))


def said_of(member, kind):
    """What a rank raises, in a step in which a form depends on the shard, or on the step."""
    net = net_of()
    try:
        for step in steps(member, State(net=net)):

            def output(batch, number=step.number):
                values = net(batch.data[0])
                if kind == "shape of a shard":
                    return values[: 1 + (batch.shard == 5)]
                if kind == "type of a shard":
                    return values.double() if batch.shard == 7 else values
                return values[:number]

            step.sum(output)
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("shape of a shard", "found shape [2, 3], torch.float32, with a graph for shard 5"),
        ("type of a shard", "found shape [3, 3], torch.float64, with a graph for shard 7"),
        ("shape of a step", "shape [1, 3], torch.float32, with a graph, as in the steps before"),
    ],
)
def test_a_sum_whose_form_depends_on_shard_or_step_is_refused_on_every_rank(ranks, kind, says, world_size):
    """gloo ends the process where two ranks send different sizes."""
    for said in ranks.run(world_size, said_of, kind):
        assert says in said


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (lambda outputs: (outputs.sum(), outputs.mean()), "found a tuple"),
        (lambda outputs: outputs.sum().item(), "found a float"),
        (
            lambda outputs: outputs.to_sparse(),
            r"torch.sparse_coo",
        ),
    ],
)
def test_what_cannot_be_summed_is_refused_by_its_type(output, says):
    net, step = step_of()
    with pytest.raises(UsageError, match=says):
        step.sum(lambda batch: output(net(batch.data[0])))


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (lambda outputs: outputs.square().mean(1), r"\.mean\(\).* found a tensor of shape \[3\]"),
        (lambda outputs: outputs.sum().item(), "found a float"),
        (lambda outputs: outputs.detach().sum(), "found a tensor .*, without a graph"),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_graph_is_refused(output, says):
    """`reduction="none"` gives a vector; torch's own message does not say what to do."""
    net, step = step_of()
    with pytest.raises(UsageError, match=says):
        step.mean_loss(lambda batch: output(net(batch.data[0])))


def test_a_name_that_the_run_itself_writes_is_refused():
    """The recipe's value would be lost without a word."""
    _, step = step_of()
    step.log(loss=0.5, step=step.number, epoch=step.epoch)
    for name in OWN_NAMES:
        with pytest.raises(UsageError, match=f"{name}.*a name of the recipe's own"):
            step.log(**{name: 0.125})


def test_what_is_logged_after_the_line_was_written_is_refused():
    """In a function of run.on_step, or once the next step is there: it would be lost."""
    _, step = step_of()
    step.has_line = True
    with pytest.raises(
        UsageError, match=r"step\.log\(a=\.\.\., b=\.\.\.\): the line of step 1 .* is written already"
    ):
        step.log(a=0.5, b=1)


def test_a_graph_that_the_body_made_for_all_shards_is_told_as_such():
    """Normalised weights: the second shard's backward finds the graph of the first one gone."""
    net, step = step_of()
    rows = F.normalize(net.weight)
    with pytest.raises(UsageError, match=r"step\.mean_loss: the graph of one shard was already used"):
        step.mean_loss(lambda batch: F.cross_entropy(F.linear(batch.data[0], rows), batch.data[1]))
