"""`.grad` holds the sum over all shards, for every mix of parameters, and nothing of an earlier
step.
"""

import pytest
import torch
from torch import nn

from elastic.errors import UsageError
from elastic.reduce import bucket as bucket_module
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import IDLE_COMPUTATIONS, Gradients
from elastic.train.state.state import State
from elastic.train.step.contract import Contract

SHARDS = 7


def alone():
    return Exchange(shards=SHARDS, world_size=1, rank=0, group=None)


def trained(parameters):
    return Contract(State(p=nn.ParameterList(parameters)))


def one_step(gradients, backward):
    """backward(shard) for every shard, then the sums into `.grad`."""
    gradients.begin_step()
    for shard in range(SHARDS):
        gradients.before_backward(shard)
        backward(shard)
        gradients.after_backward(shard)
    gradients.assign(gradients.wait(), gradients.used())


def mixed():
    """Two dtypes, interleaved, one frozen, one without elements."""
    return [
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(2, dtype=torch.float64)),
        nn.Parameter(torch.ones(4), requires_grad=False),
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(0)),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 16, 2**20])
def test_parameters_of_several_dtypes_get_their_own_sums(monkeypatch, bucket_bytes):
    """Each element's gradient is another number: a wrong offset or a wrong bucket would put it
    elsewhere.
    """
    monkeypatch.setattr(bucket_module, "BUCKET_BYTES", bucket_bytes)
    parameters = mixed()
    marks = [torch.arange(p.numel(), dtype=p.dtype).view_as(p) + 10 * i for i, p in enumerate(parameters)]
    gradients = Gradients(trained(parameters), alone())

    def backward(shard):
        sum(
            (shard + 1) * (p * mark).sum().double() for p, mark in zip(parameters, marks, strict=True)
        ).backward()

    one_step(gradients, backward)
    for parameter, mark in zip(parameters, marks, strict=True):
        if parameter.requires_grad:
            assert parameter.grad.dtype == parameter.dtype
            assert torch.equal(parameter.grad, mark * (SHARDS * (SHARDS + 1) // 2))
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("touched", [0, 2, SHARDS - 1])
def test_a_parameter_used_by_one_shard_has_its_gradient(touched):
    """The first, one in the middle, the last: whether the shard is the first of its pair must not
    matter.
    """
    always, once = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    never = nn.Parameter(torch.ones(2))
    gradients = Gradients(trained([always, once, never]), alone())
    one_step(gradients, lambda shard: (always.sum() + (3 * once.sum() if shard == touched else 0)).backward())
    assert always.grad.tolist() == [7.0, 7.0]
    assert once.grad.tolist() == [3.0, 3.0]
    assert never.grad is None


def test_a_step_has_nothing_of_the_one_before():
    """Vectors are used again: one that was not cleared would add the last step's gradient; a mark
    that stayed would make a zero of None.
    """
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = Gradients(trained([one, other]), alone())
    one_step(gradients, lambda _leaf: (one + other).sum().backward())
    one_step(gradients, lambda _leaf: (2 * one).sum().backward())
    assert one.grad.tolist() == [14.0, 14.0]
    assert other.grad is None


def test_memory_does_not_grow_with_steps():
    """A vector that is not given back would cost the size of the model at every step."""
    parameter = nn.Parameter(torch.ones(2))
    gradients = Gradients(trained([parameter]), alone())
    places = []
    for _ in range(4):
        one_step(gradients, lambda _leaf: parameter.sum().backward())
        (bucket,) = gradients._layout.buckets
        places.append({flat.data_ptr() for flat in [*bucket._free, *bucket.stack.parts.values()]})
    assert places[1] == places[2] == places[3]


def test_a_closed_sum_shards_the_parameters_alone():
    """After the run a recipe may train a probe on the same model; hooks that stayed would send its
    gradients.
    """
    parameter = nn.Parameter(torch.ones(2))
    gradients = Gradients(trained([parameter]), alone())
    gradients.close()
    gradients.begin_step()
    parameter.sum().backward()
    assert gradients.used() == [0.0]


def order_of_sums(member):
    """Which bucket was sent at which point of the last backward, on this rank."""
    with pytest.MonkeyPatch.context() as patch:  # the rank serves other tests afterwards
        patch.setattr(bucket_module, "BUCKET_BYTES", 1)
        return _order_of_sums(member)


def _order_of_sums(member):
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    exchange = Exchange(shards=4, world_size=member.world_size, rank=member.rank, group=member.group)
    gradients = Gradients(trained([first.weight, second.weight]), exchange)
    sent = []
    send = gradients._send
    gradients._send = lambda: (sent.append(gradients._next), send())
    gradients.begin_step()
    for shard in exchange.own_shards:
        gradients.before_backward(shard)
        # Rank 1 does not use the layer whose bucket goes first: it must still send that one first,
        # as the others do.
        output = first(torch.ones(3))
        (output if member.rank == 1 else second(output)).sum().backward()
        gradients.after_backward(shard)
    gradients.assign(gradients.wait(), torch.ones(2))
    gradients.close()
    return [sent, first.weight.grad.abs().sum().item() > 0]


def test_buckets_are_sent_in_one_order_on_every_rank(ranks):
    """One rank's backward finishes the buckets in another order, as a branch in a model may do:
    collectives that cross would mix gradients.
    """
    assert ranks.run(3, order_of_sums) == [[[0, 1], True]] * 3


MINUS_ZERO = -(2**31)  # the bits of -0.0 in float32, as an integer


def bits_of_gradients(member, touched):
    """Of one parameter that both shards use and one that a single shard uses: all give -0.0."""
    both, one = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    exchange = Exchange(shards=2, world_size=member.world_size, rank=member.rank, group=member.group)
    gradients = Gradients(trained([both, one]), exchange)
    gradients.begin_step()
    for shard in exchange.own_shards:
        gradients.before_backward(shard)
        (-0.0 * (both + one if shard == touched else both).sum()).backward()
        gradients.after_backward(shard)
    gradients.assign(gradients.wait(), torch.ones(2))
    gradients.close()
    return [p.grad.view(torch.int32).tolist() for p in (both, one)]


@pytest.mark.parametrize("touched", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sign_of_a_zero_is_the_same_at_every_world_size(ranks, world_size, touched):
    """SGD with momentum keeps the sign of a zero: a state would tell how many workers it had."""
    expected = [[MINUS_ZERO] * 2, [0, 0]]
    assert ranks.run(world_size, bits_of_gradients, touched) == [expected] * world_size


def test_a_gradient_in_parts_is_summed_per_shard_first():
    """As reentrant checkpointing gives it. 1 + 2^-24 is 1 in float32, so the order shows: added one
    by one to the first shard's 1, the two parts of the second would vanish.
    """
    parameter = nn.Parameter(torch.ones(1))
    gradients = Gradients(trained([parameter]), Exchange(shards=2, world_size=1, rank=0, group=None))
    parts = {0: [0.5, 0.5], 1: [2.0**-24, 2.0**-24]}
    gradients.begin_step()
    for shard in range(2):
        gradients.before_backward(shard)
        for part in parts[shard]:
            (part * parameter).sum().backward()
        gradients.after_backward(shard)
    gradients.assign(gradients.wait(), gradients.used())
    assert parameter.grad.item() == 1 + 2.0**-23


def test_a_gradient_in_parts_in_some_shards_only_is_refused():
    """The second shard of a pair was added in place already when its second part comes."""
    parameter = nn.Parameter(torch.ones(1))
    gradients = Gradients(trained([parameter]), alone())

    def backward(shard):
        for _ in range(1 + shard):
            parameter.sum().backward()

    with pytest.raises(UsageError, match=r"the gradient of p\.0 in as many parts.*use_reentrant=False"):
        one_step(gradients, backward)


def test_vectors_of_parameters_frozen_later_are_given_back():
    """Each stage of progressive unfreezing has a layout, which would keep the size of a model."""
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = Gradients(trained([one, other]), alone())
    one_step(gradients, lambda _shard: (one + other).sum().backward())
    other.requires_grad_(requires_grad=False)
    for _ in range(IDLE_COMPUTATIONS + 2):
        one_step(gradients, lambda _shard: one.sum().backward())
    assert len(gradients._layouts) == 1


@pytest.mark.parametrize(
    "keep",
    [lambda g: g, lambda g: g.view(-1)[:1], lambda g: g.detach()],
    ids=["itself", "a part", "another tensor"],
)
@pytest.mark.parametrize("when", ["in each shard", "after the step"])
def test_a_gradient_that_is_kept_stays_as_it_was(keep, when):
    """Itself, a part of it, or another tensor of its memory. Vectors are used again afterwards."""
    parameter = nn.Parameter(torch.ones(2))
    gradients = Gradients(trained([parameter]), alone())
    kept, seen = [], []

    def look():
        kept.append(keep(parameter.grad))
        seen.append(kept[-1].tolist())

    for step in range(1, 5):

        def backward(shard, step=step):
            if when == "in each shard" and shard % 2:  # the first shard of the pair has given one
                look()
            (step * (shard + 1) * parameter).sum().backward()

        one_step(gradients, backward)
        if when == "after the step":
            look()
        # A pair's sum changes within its own step, and never in a later one.
        parameter.grad = None
    before = [each.tolist() for each in kept]
    one_step(gradients, lambda _shard: (100 * parameter).sum().backward())
    assert [each.tolist() for each in kept] == before
    if when == "after the step":
        assert before == seen


def test_assigned_gradient_memory_ends_with_its_step():
    """`.grad.data = ...` gives it another type or other numbers; the next step has its own sums."""
    parameter = nn.Parameter(torch.ones(2))
    gradients = Gradients(trained([parameter]), alone())
    one_step(gradients, lambda _shard: parameter.sum().backward())
    parameter.grad.data = torch.full((2,), 5.0)
    one_step(gradients, lambda _shard: (2 * parameter).sum().backward())
    assert parameter.grad.tolist() == [2.0 * SHARDS] * 2
