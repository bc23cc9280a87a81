"""What ranks say to each other at the end of a step, and what no shard changes, over real ranks."""

from functools import partial

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, parts_of, samples, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State
from elastic.train.step.parts import Requests
from elastic.train.step.step import Step

DRAIN_AT, OVERFLOW_AT = 2, 2


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
def test_a_drain_or_save_asked_by_one_rank_is_seen_by_all_at_that_step(ranks, world_size):
    """A rank that missed it would train on alone, or hang."""
    assert ranks.run(world_size, asked) == [[[], ["drain"], ["save", "compare"], []]] * world_size


def scaled(member):
    """Shard 1's gradient overflows at one step. One layer is never used, one by a single shard."""
    torch.manual_seed(0)
    net, unused = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)
    rare = nn.Parameter(torch.ones(CLASSES))
    optimizer = torch.optim.AdamW([*net.parameters(), *unused.parameters(), rare], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parts = nn.ModuleDict({"net": net, "unused": unused, "rare": nn.ParameterList([rare])})
    state, found = State(parts=parts, optimizer=optimizer, scaler=scaler), []
    for step in steps(member, state):

        def loss(batch, number=step.number):
            outputs = net(batch.data[0]) * (rare if batch.shard == 4 else 1)
            is_huge = number == OVERFLOW_AT and batch.shard == 1
            return F.cross_entropy(outputs, batch.data[1]) * (1e38 if is_huge else 1)

        step.mean_loss(loss, scaler)
        assert rare.grad is not None and [p.grad for p in unused.parameters()] == [None] * 2
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return [found, checksum_of(state.flatten()).whole]


def test_an_overflow_on_one_shard_is_skipped_by_all_ranks(ranks):
    """And a zero in the place of no gradient would let weight decay shrink the unused layer."""
    (expected,) = ranks.run(1, scaled)
    assert expected[0] == [1024.0, 512.0, 512.0, 512.0]
    assert ranks.run(3, scaled) == [expected] * 3


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
