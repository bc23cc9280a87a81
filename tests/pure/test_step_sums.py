"""A sum over shards takes what can be summed, and refuses the rest on every rank; with it ranks say
to each other what they are asked for.
"""

from functools import partial

import pytest
import torch
from steps import ALONE, BATCH, CLASSES, FEATURES, parts_of, samples, steps
from torch import nn

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import UsageError
from elastic.train.state.state import State
from elastic.train.step.parts import Requests
from elastic.train.step.step import Step


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
def test_a_sum_of_changing_form_is_refused_on_every_rank(ranks, kind, says, world_size):
    """gloo ends the process where two ranks send different sizes."""
    for said in ranks.run(world_size, said_of, kind):
        assert says in said


DRAIN_AT = 2


def asked(member):
    """The last rank alone asks for a drain; rank 0 for a save and a comparison, one step later."""
    net = nn.Linear(FEATURES, CLASSES)
    order = SampleOrder(seed=5, samples=48, global_batch=12, shards=6, epochs=1, tail=Tail.DROP)
    parts = parts_of(State(net=net), order, member)
    batches = Loader(dataset=samples(), order=order, device=parts.device).steps(parts.exchange.own_shards, 1)

    def requests(number):
        is_last, is_first = member.rank == member.world_size - 1, member.rank == 0
        is_later = is_first and number == DRAIN_AT + 1
        return Requests(is_last and number == DRAIN_AT, snapshot=False, save=is_later, compare=is_later)

    found = []
    for number in range(1, order.steps + 1):
        step = Step(number, parts, partial(next, batches), requests)
        step.mean_loss(lambda batch: net(batch.data[0]).square().mean())
        found.append([name for name, is_asked in step.outcome.requests._asdict().items() if is_asked])
        parts.contract.end_step()
    parts.gradients.close()
    parts.contract.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_one_rank_asks_for_is_seen_by_all_at_that_step(ranks, world_size):
    """A rank that missed it would train on alone, or hang."""
    assert ranks.run(world_size, asked) == [[[], ["drain"], ["save", "compare"], []]] * world_size


def test_a_step_passes_its_points_in_order():
    """Faults strike at these points; one that is not passed could never be drilled."""
    net, passed = nn.Linear(FEATURES, CLASSES), []
    step = next(steps(ALONE, State(net=net), shards=4))
    step.fault_point = passed.append
    totals = [step.sum(lambda batch: net(batch.data[0]).sum()) for _ in range(2)]
    step.backward(sum(totals))
    assert passed == ["forward"] * 8 + ["backward"] * 4 + ["mid-sum"]
    net.zero_grad()
    passed.clear()
    step.mean_loss(lambda batch: net(batch.data[0]).mean())
    assert passed == ["forward", "backward"] * 4 + ["mid-sum"]
