"""What ranks say to each other at the end of a step, over real ranks."""

from functools import partial

import pytest
from steps import ALONE, CLASSES, FEATURES, parts_of, samples, steps
from torch import nn

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.train.state.state import State
from elastic.train.step.parts import Requests
from elastic.train.step.step import Step

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
def test_a_drain_or_save_asked_by_one_rank_is_seen_by_all_at_that_step(ranks, world_size):
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
