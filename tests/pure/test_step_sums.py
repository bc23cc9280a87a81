"""A sum over shards takes what can be summed, and refuses the rest on every rank; with it ranks say
to each other what they are asked for.
"""

import pytest
import torch
from steps import ALONE, BATCH, CLASSES, FEATURES, steps
from torch import nn

from elastic.errors import UsageError
from elastic.train.state.state import State
from elastic.train.step.parts import Requests


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


LATE = {"shape of a shard": 5, "type of a shard": 7}


def said_of(member, kind):
    """What a rank raises, in a step in which a form depends on the shard, or on the step."""
    net = net_of()
    try:
        for step in steps(member, State(net=net)):

            def output(batch, number=step.number):
                values, is_late = net(batch.data[0]), batch.shard == LATE.get(kind)
                if kind == "type of a shard":
                    return values.double() if is_late else values
                return values[: 1 + is_late] if kind == "shape of a shard" else values[:number]

            step.sum(output)
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("shape of a shard", "found shape [2, 3], torch.float32, with a graph for shard 5"),
        ("type of a shard", "found shape [3, 3], torch.float64, with a graph for shard 7"),
        ("shape of a step", "shape [1, 3], torch.float32, with a graph, as in the steps before"),
    ],
)
def test_a_sum_of_changing_form_is_refused_on_every_rank(ranks, kind, says, world_size):
    """gloo ends the process where two ranks send different sizes."""
    for said in ranks.run(world_size, said_of, kind):
        assert says in said


def asked(member):
    """The last rank alone asks for a drain; rank 0 for a save and a comparison, one step later."""
    net, found = nn.Linear(FEATURES, CLASSES), []

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
