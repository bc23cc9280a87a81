"""A computation ends with the mean over shards of what the buffers became, however few of them are
copied and summed; what no forward changed keeps its bits.
"""

from functools import reduce
from itertools import chain

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.reduce.tree import Block, fold, span
from elastic.train.state.state import State
from elastic.train.step.buffers import LARGE_NUMBERS, Buffers

CPU = torch.device("cpu")
LARGE = LARGE_NUMBERS + 3
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64]
WAYS = ["in place", "assigned", "through data", "data assigned"]


def holding(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def holder(forms):
    """A module with a buffer of each of these (dtype, numbers)."""
    module = nn.Module()
    for index, (dtype, numbers) in enumerate(forms):
        draw = torch.Generator().manual_seed(index)
        values = torch.randint(0, 7, (numbers,), generator=draw).to(torch.float64) / 3
        module.register_buffer(f"b{index}", values.to(dtype))
    return module


def changed(value, by):
    return ~value if value.dtype is torch.bool else value * 3 + by


def write(module, name, way, by):
    """Change a buffer. by: the number of the shard, for floats."""
    buffer = getattr(module, name)
    if not (buffer.is_floating_point() or buffer.is_complex()):
        by = 1  # integers must be the same on every shard
    with torch.no_grad():
        new = changed(buffer, by)
        match way:
            case "in place":
                buffer.copy_(new)
            case "assigned":
                setattr(module, name, new)
            case "through data":
                buffer.data.copy_(new)
            case "data assigned":
                buffer.data = new


def together(worlds, contributions):
    """The sum of all ranks' shards, in the order of the tree, once for each rank."""
    parts = {Block(shard, 1): value for shard, value in chain.from_iterable(c.items() for c in contributions)}
    total = fold(dict(sorted(parts.items())), len(parts), lambda one, other: one.clone().add_(other))
    return [total.clone() for _ in worlds]


def compute(ranks, shards, forward=lambda _module, _shard: None):
    """One computation of these ranks' (module, buffers), by forward(module, shard)."""
    after = [{} for _ in ranks]
    for rank, (module, buffers) in enumerate(ranks):
        buffers.begin()
        for shard in span(shards, len(ranks), rank):
            buffers.load()
            forward(module, shard)
            after[rank][shard] = buffers.save()

    def summed():
        return together(
            ranks, [buffers.contributions(each) for (_, buffers), each in zip(ranks, after, strict=True)]
        )

    totals = summed()
    found = {
        buffers.found_changes(buffers.sums.signs(total).tolist())
        for (_, buffers), total in zip(ranks, totals, strict=True)
    }
    assert len(found) == 1  # all ranks take part in the second sum, or none
    if found == {True}:
        totals = summed()
    for (_, buffers), total in zip(ranks, totals, strict=True):
        signs = buffers.sums.signs(total).tolist()
        assert buffers.sums.have_same_integers(signs)
        buffers.end(total, signs)


def plain(module, shards, forward):
    """The plain old way: each shard from a copy of all buffers; the mean over shards of all."""
    opening = {name: buffer.clone() for name, buffer in module.named_buffers()}
    left = []
    for shard in range(shards):
        alone = nn.Module()
        for name, value in opening.items():
            alone.register_buffer(name, value.clone())
        forward(alone, shard)
        left.append(dict(alone.named_buffers()))
    for name, value in opening.items():
        values = [of_shard[name] for of_shard in left]
        if not (value.is_floating_point() or value.is_complex()):
            module.get_buffer(name).copy_(values[0])
        elif any(not torch.equal(each, value) for each in values):
            wide = torch.complex128 if value.is_complex() else torch.float64
            parts = {Block(shard, 1): each.to(wide) for shard, each in enumerate(values)}
            module.get_buffer(name).copy_(fold(parts, shards, lambda one, other: one + other) / shards)


@st.composite
def programs(draw):
    """(forms of buffers, shards, for each computation: which shard writes which buffer how)."""
    numbers = st.sampled_from([1, 5, LARGE])
    forms = draw(st.lists(st.tuples(st.sampled_from(DTYPES), numbers), min_size=1, max_size=4))
    shards = draw(st.integers(3, 6))
    computations = []
    for number in range(draw(st.integers(1, 4))):
        # What torch does not count is found in the first computation; for small buffers in each.
        writes = []
        for index, (dtype, size) in enumerate(forms):
            ways = WAYS if number == 0 or size < LARGE_NUMBERS else ["in place", "assigned", "data assigned"]
            if dtype.is_floating_point or dtype.is_complex:
                who = draw(st.sets(st.integers(0, shards - 1)))
            else:
                who = set(range(shards)) if draw(st.booleans()) else set()
            writes += [(shard, f"b{index}", draw(st.sampled_from(ways))) for shard in sorted(who)]
        body = draw(st.lists(st.tuples(st.integers(0, len(forms) - 1), st.sampled_from(WAYS)), max_size=2))
        computations.append((writes, body))
    return forms, shards, computations


def run(program, world_size):
    """The bits of all buffers after each computation, of each rank. world_size 0: the plain way."""
    forms, shards, computations = program
    modules = [holder(forms) for _ in range(world_size or 1)]
    ranks = [(module, Buffers(State(module=module), shards, CPU)) for module in modules]
    seen = []
    for writes, body in computations:

        def forward(module, shard, writes=writes):
            for writer, name, way in writes:
                if writer == shard:
                    write(module, name, way, shard)

        for module in modules:
            for index, way in body:
                write(module, f"b{index}", way, 1)
        if world_size:
            compute(ranks, shards, forward)
        else:
            plain(modules[0], shards, forward)
        seen.append([[bits(buffer) for buffer in module.buffers()] for module in modules])
    return seen


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


IN_A_BRANCH = (
    [(torch.float32, LARGE), (torch.bool, LARGE)],
    3,
    [([], []), ([(1, "b0", "in place")], [(0, "through data")]), ([(0, "b0", "assigned")], [])],
)


@settings(max_examples=25, deadline=None)
@given(programs())
@example(IN_A_BRANCH)
def test_every_world_size_has_the_bits_of_the_plain_way(program):
    """The plain way is the twin: it copies, and takes the mean of, everything for each shard."""
    expected = [of_ranks[0] for of_ranks in run(program, 0)]
    for world_size in (1, 2, 3):
        for of_ranks, of_plain in zip(run(program, world_size), expected, strict=True):
            assert of_ranks == [of_plain] * world_size


def test_a_large_buffer_costs_nothing_until_a_shard_changes_it():
    """Four masks of nanoGPT cost more than a second a step."""
    module = holder([(torch.float32, LARGE), (torch.int64, 1)])
    buffers = Buffers(State(net=module), 4, CPU)
    for _ in range(2):
        compute([(module, buffers)], 4)
    buffers.begin()
    first = buffers.save()
    buffers.load()
    assert buffers.save().values[0] is first.values[0]
    assert buffers.sums.length < 10
    compute([(module, buffers)], 4, lambda each, shard: shard == 2 and write(each, "b0", "in place", 1))
    assert buffers.sums.length > LARGE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(
    values=st.lists(st.floats(allow_nan=False, width=16), min_size=1, max_size=9), shards=st.integers(1, 13)
)
def test_floats_that_no_forward_changed_keep_their_bits(dtype, values, shards):
    """The sum of 13 equal values divided by 13 is not always the value. Zeros keep their sign."""
    tensor = (torch.tensor(values, dtype=torch.float64) / 3).to(dtype)
    before = tensor.clone()
    compute([(module := holding(anchor=tensor), Buffers(State(module=module), shards, CPU))], shards)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


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
    buffers = Buffers(State(net=holding(counts=counts)), 2, CPU)
    buffers.begin()
    after = {}
    for shard, added in enumerate((one, other)):
        buffers.load()
        counts.add_(torch.tensor(added))
        after[shard] = buffers.save()
    total = reduce(torch.add, buffers.contributions(after).values())
    assert not buffers.sums.have_same_integers(buffers.sums.signs(total).tolist())
    assert buffers.changed_integers(after.values()) == "net.counts"


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
