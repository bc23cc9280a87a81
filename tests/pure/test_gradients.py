"""`.grad` holds the sum over all shards, for every mix of parameters, and nothing of an earlier
step.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps import ALONE
from torch import nn

from elastic.errors import UsageError
from elastic.reduce import bucket as bucket_module
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.train.state.state import State
from elastic.train.step.contract import Contract

SHARDS = 7


def gradients_of(*parameters, member=ALONE, shards=SHARDS):
    own = {"world_size": member.world_size, "rank": member.rank, "group": member.group}
    return Gradients(Contract(State(p=nn.ParameterList(parameters))), Exchange(shards=shards, **own))


def ones(count=2):
    return nn.Parameter(torch.ones(count))


def one_step(gradients, backward, used=()):
    """backward(shard) for every own shard, then the sums into `.grad`."""
    gradients.begin_computation()
    for shard in gradients._exchange.own_shards:
        gradients.before_backward(shard)
        backward(shard)
        gradients.after_backward(shard)
    if gradients._exchange.world_size > 1:
        assert gradients.sum(torch.ones(3)).tolist() == [float(gradients._exchange.world_size)] * 3
    gradients.assign(used)


@settings(max_examples=30)
@given(st.lists(st.sets(st.integers(0, SHARDS - 1)), min_size=2, max_size=4))
@example([{0}, {2}, {SHARDS - 1}, set()])
def test_a_sum_is_of_the_shards_that_used_the_parameter(steps_users):
    """A zero in the place of None would be another gradient."""
    always, some, never = ones(), ones(), ones()
    gradients = gradients_of(always, some, never)
    for step, users in enumerate(steps_users, start=1):

        def backward(shard, step=step, users=users):
            used = [((shard + 1) * some).sum()] * (shard in users)
            sum([(step * always).sum(), *used]).backward()

        one_step(gradients, backward)
        assert always.grad.tolist() == [SHARDS * step] * 2 and never.grad is None
        found = None if some.grad is None else some.grad.tolist()
        assert found == ([sum(shard + 1 for shard in users)] * 2 if users else None)


def order_of_sums(member):
    """The lengths of the vectors that this rank sends in its second step, and their sums."""
    with pytest.MonkeyPatch.context() as patch:  # the rank serves other tests afterwards
        patch.setattr(bucket_module, "BUCKET_BYTES", 1)
        layers = [nn.Linear(3, 100 * size, bias=False) for size in (1, 2, 3)]
        gradients = gradients_of(*(layer.weight for layer in layers), member=member, shards=3)
        sent, add_up = [], gradients._exchange.sum

        def sum_and_note(vectors, what):
            sent.append(next(iter(vectors.values())).numel() // 300)
            return add_up(vectors, what)

        patch.setattr(gradients._exchange, "sum", sum_and_note)

        def backward(_shard):
            """Rank 1 does not use the layer whose bucket goes first, and must send it first."""
            used = layers[:2] if member.rank == 1 else layers
            sum(layer(torch.ones(3)).sum() for layer in used).backward()

        for _ in range(2):
            one_step(gradients, backward, used=torch.ones(3))
        gradients.close()
    return [sent, [layer.weight.grad.unique().tolist() for layer in layers]]


def test_buckets_are_sent_in_one_order_on_every_rank(ranks):
    """One rank's backward finishes the buckets in another order, as a branch in a model may do:
    collectives that cross would mix gradients.
    """
    assert ranks.run(3, order_of_sums) == [[[3, 2, 1] * 2, [[3.0], [3.0], [2.0]]]] * 3


MINUS_ZERO = -(2**31)  # the bits of -0.0 in float32, as an integer


def bits_of_gradients(member, touched):
    """Of one parameter that both shards use and one that a single shard uses: all give -0.0."""
    both, one = ones(), ones()
    gradients = gradients_of(both, one, member=member, shards=2)

    def backward(shard):
        (-0.0 * (both + one if shard == touched else both).sum()).backward()

    one_step(gradients, backward, used=torch.ones(2))
    gradients.close()
    return [p.grad.view(torch.int32).tolist() for p in (both, one)]


@pytest.mark.parametrize("touched", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sign_of_a_zero_is_the_same_at_every_world_size(ranks, world_size, touched):
    """SGD with momentum keeps the sign of a zero: a state would tell how many workers it had."""
    expected = [[MINUS_ZERO] * 2, [0, 0]]
    assert ranks.run(world_size, bits_of_gradients, touched) == [expected] * world_size


def places_of_gradients(member):
    """Strides and alignment, by which kernels choose how they add."""
    images = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)
    parameters = list(map(nn.Parameter, (torch.ones(3), images, torch.ones(3, 5).t())))
    gradients = gradients_of(*parameters, member=member, shards=3)
    one_step(gradients, lambda _shard: sum((p * p).sum() for p in parameters).backward(), used=[1.0] * 3)
    gradients.close()
    return [[*p.grad.stride(), p.grad.data_ptr() % 64] for p in parameters]


def test_gradients_lie_alike_at_every_world_size(ranks):
    (alone,) = ranks.run(1, places_of_gradients)
    assert alone == [[1, 0], [12, 1, 6, 3, 0], [1, 5, 0]]
    for world_size in (2, 3):
        assert ranks.run(world_size, places_of_gradients) == [alone] * world_size


def bits_of_parts(member):
    """Of a gradient that each shard gives in three parts, as reentrant checkpointing does."""
    gradients = gradients_of(parameter := ones(1), member=member, shards=4)

    def backward(shard):
        for part in (0.1, 0.7, 1e4):
            (part**shard * parameter).sum().backward()

    for _ in range(2):
        one_step(gradients, backward, used=[1.0])
    gradients.close()
    return parameter.grad.view(torch.int32).tolist()


def test_a_gradient_in_parts_joins_the_tree_as_one(ranks):
    """Autograd would add each part of a second shard to the sum of the pair."""
    parts = [torch.tensor([0.1**shard, 0.7**shard, 1e4**shard]) for shard in range(4)]
    a, b, c, d = (one + two + three for one, two, three in parts)
    expected = ((a + b) + (c + d)).view(1).view(torch.int32).tolist()
    for world_size in (1, 2, 3):
        assert ranks.run(world_size, bits_of_parts) == [expected] * world_size


def test_a_gradient_in_parts_of_a_second_shard_alone_is_refused():
    def backward(shard):
        for _ in range(1 + shard):
            parameter.sum().backward()

    gradients = gradients_of(parameter := ones(1), shards=2)
    with pytest.raises(UsageError, match=r"the gradient of p\.0, once a shard.*use_reentrant=False"):
        one_step(gradients, backward)
