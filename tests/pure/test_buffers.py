"""A step ends with the mean over shards of what the buffers became, and buffers that nothing
changed keep their bits.
"""

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic.errors import UsageError
from elastic.train.state.state import State
from elastic.train.step.buffers import Buffers

CPU = torch.device("cpu")


def holder(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def step(module, shards, forward=lambda _shard: None):
    """One step of a world of one: every shard from the opening values, then the sum."""
    buffers = Buffers(State(module=module), shards, CPU)
    buffers.begin()
    after = {}
    for shard in range(shards):
        buffers.load()
        forward(shard)
        after[shard] = buffers.save()
    total = reduce(torch.add, buffers.contributions(after).values())
    if buffers.found_changes(buffers.signs(total).tolist()):
        total = reduce(torch.add, buffers.contributions(after).values())
    signs = buffers.signs(total).tolist()
    assert buffers.have_same_integers(signs)
    buffers.end(total, signs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(
    values=st.lists(st.floats(allow_nan=False, width=16), min_size=1, max_size=9), shards=st.integers(1, 13)
)
def test_floats_that_no_forward_changed_keep_their_bits(dtype, values, shards):
    """The sum of 13 equal values divided by 13 is not always the value. Zeros keep their sign."""
    tensor = (torch.tensor(values, dtype=torch.float64) / 3).to(dtype)
    before = tensor.clone()
    step(holder(anchor=tensor), shards)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_integers_that_no_forward_changed_keep_their_bits(dtype):
    """The ends of each type's range, as masks and indices may hold them."""
    ends = [0, 1] if dtype is torch.bool else [torch.iinfo(dtype).min, 0, 1, torch.iinfo(dtype).max]
    tensor = torch.tensor(ends, dtype=dtype)
    before = tensor.clone()
    step(holder(mask=tensor), 6)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_become_the_mean_over_shards(dtype):
    """Every shard adds its number to the opening value, as if it alone had been there."""
    tensor = torch.tensor([1.0, -2.0], dtype=dtype)
    step(holder(average=tensor), 4, tensor.add_)
    assert tensor.tolist() == [2.5, -0.5]


def test_integers_are_those_that_every_shard_has():
    """Each shard counts by the same amount, as BatchNorm counts batches."""
    count = torch.tensor(7)
    step(holder(count=count), 4, lambda _shard: count.add_(10))
    assert count.item() == 17


@pytest.mark.parametrize("shards", [2, 4, 7, 256])
def test_integers_that_differ_between_shards_are_found_by_name(shards):
    """One shard alone counts one more, in the second of three buffers."""
    same, counts, mask = torch.tensor(7), torch.zeros(5, dtype=torch.int32), torch.ones(3, dtype=torch.bool)
    buffers = Buffers(State(net=holder(same=same, counts=counts, mask=mask)), shards, CPU)
    buffers.begin()
    after, hashes = {}, []
    for shard in range(shards):
        buffers.load()
        same.add_(1)
        counts[2] += 3 + (shard == shards - 1)
        after[shard] = buffers.save()
        hashes.append(buffers.hashes(after[shard]))
    total = reduce(torch.add, buffers.contributions(after).values())
    assert not buffers.have_same_integers(buffers.signs(total).tolist())
    assert buffers.different_integers(reduce(torch.add, hashes)) == ["net.counts"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([0, 2, 0], [1, 0, 1]),
        ([2, 0], [0, 1]),
        ([0, 0], [0, -(2**63)]),
        ([1 << 60], [1 << 61]),
        ([0], [-1]),
        ([0], [13_303_762]),  # one hash of 25 bits is the same for both
    ],
)
def test_integers_of_equal_moment_are_told_apart(one, other):
    """Two shards count the labels 1, 1 and 0, 2: as many samples, with the same mean label.

    Or only the highest bits differ, as in a mask of 64 bits.
    """
    counts = torch.zeros(len(one), dtype=torch.int64)
    buffers = Buffers(State(net=holder(counts=counts)), 2, CPU)
    buffers.begin()
    after = {}
    for shard, added in enumerate((one, other)):
        buffers.load()
        counts.add_(torch.tensor(added))
        after[shard] = buffers.save()
    total = reduce(torch.add, buffers.contributions(after).values())
    assert not buffers.have_same_integers(buffers.signs(total).tolist())
    hashes = reduce(torch.add, map(buffers.hashes, after.values()))
    assert buffers.different_integers(hashes) == ["net.counts"]


def test_every_shard_starts_from_the_opening_values():
    """A shard must not see what another one left in a buffer: the result would depend on which
    shards a rank has.
    """
    seen = []
    tensor = torch.zeros(1)
    step(holder(average=tensor), 3, lambda _shard: (seen.append(tensor.item()), tensor.add_(1)))
    assert seen == [0.0, 0.0, 0.0]


def test_a_buffer_of_two_modules_is_one_buffer():
    """A teacher may share a buffer with its student.

    Counted twice, it would be set twice, from different parts of the sum.
    """
    shared = torch.ones(3)
    one, other = holder(a=shared), holder(b=shared, c=torch.ones(2))
    buffers = Buffers(State(one=one, other=other), 2, CPU)
    buffers.begin()
    assert buffers.length == 5


@pytest.mark.parametrize("rows", [4, 10_000], ids=["moving", "still"])
def test_a_buffer_whose_elements_share_memory_is_refused_by_name_before_the_first_shard(rows):
    """Torch's own error would come from the middle of a step, or from a resume."""
    module = holder(good=torch.zeros(2), ex=torch.randn(1, 3).expand(rows, 3))
    with pytest.raises(UsageError, match=r"one element several times in module\.ex, as expand makes it"):
        Buffers(State(module=module), 2, CPU).begin()


def test_a_copy_of_an_expanded_tensor_and_dimensions_of_one_element_are_buffers_as_others():
    module = holder(copy=torch.randn(1, 3).expand(4, 3).clone(), one=torch.arange(5.0).expand(1, -1))
    before = {name: each.clone() for name, each in module.named_buffers()}
    step(module, 3)
    assert all(torch.equal(each, before[name]) for name, each in module.named_buffers())


def test_an_expanded_cache_outside_the_state_is_left_alone():
    module = holder(good=torch.zeros(2))
    module.register_buffer("mask", torch.ones(1, 3).expand(4, 3), persistent=False)
    step(module, 2)


def test_modules_without_buffers_contribute_nothing():
    """A plain linear model: the sum at the end of a step has no place for buffers."""
    buffers = Buffers(State(net=nn.Linear(2, 2)), 8, CPU)
    buffers.begin()
    assert buffers.length == 0
    assert buffers.contributions({0: buffers.save()})[0].shape == (0,)
    buffers.end(torch.zeros(0, dtype=torch.float64), [])


def test_loading_buffers_keeps_graphs_of_earlier_shards_valid():
    """In the form with sums, shard 0's graph is alive while shard 1's buffers are put in place;
    autograd must not object.
    """
    norm = nn.BatchNorm1d(3)
    buffers = Buffers(State(norm=norm), 2, CPU)
    buffers.begin()
    outputs = []
    for _ in range(2):
        buffers.load()
        outputs.append(norm(torch.randn(4, 3)))
    torch.autograd.backward(outputs, [torch.ones(4, 3)] * 2)
    assert norm.weight.grad is not None
