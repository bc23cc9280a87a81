"""Real ranks over gloo end up with the bits of one plain recursive sum, whatever their number."""

import struct
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.errors import PeerLost
from elastic.reduce.exchange import Exchange, decode, encode
from elastic.reduce.tree import Stack, fold, spans_of

DTYPES = ["float64", "float32", "bfloat16", "float16"]
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -6e4, 6e4]


def leaves(shards, length, dtype, seed):
    """Numbers of many magnitudes, so that other orders of addition give other bits; some are
    special.
    """
    draw = torch.Generator().manual_seed(seed)
    shape, f64 = (shards, length), torch.float64
    numbers = torch.randn(shape, generator=draw, dtype=f64) * 2.0 ** torch.randint(
        -8, 8, shape, generator=draw
    )
    special = torch.tensor(SPECIAL, dtype=f64)[torch.randint(len(SPECIAL), shape, generator=draw)]
    is_special = torch.rand(shape, generator=draw) < 0.02
    return list(torch.where(is_special, special, numbers).to(dtype))


def bits(value):
    """All NaNs are one: IEEE leaves open which of two NaNs a sum passes on."""
    return value.masked_fill(value.isnan(), torch.nan).view(torch.uint8).tolist()


def sums_on_this_rank(member, cuts, length, name, seed):
    """Whether each sum has the bits of a fold in one process (test_tree.py), of shards and of the
    blocks of a stack.

    cuts: how many shards each rank has, for one sum after the other.
    """
    shards, dtype, found = sum(cuts[0]), getattr(torch, name), []
    exchange = Exchange(shards=shards, world_size=member.world_size, rank=member.rank, group=member.group)
    for counts in cuts:
        values = leaves(shards, length, dtype, seed)
        alone = {(shard, 1): value.clone() for shard, value in enumerate(values)}
        expected = bits(fold(alone, shards, torch.Tensor.add_))
        exchange.divide(spans_of(counts))
        own = {shard: values[shard].clone() for shard in exchange.own_shards}
        stack = Stack(torch.Tensor.add_)
        for shard, value in own.items():
            stack.push((shard, 1), value.clone())
        sums = exchange.sum(stack.parts, "a test"), exchange.sum_shards(own, "a test")
        found += [bits(each) == expected and each.dtype is dtype for each in sums]
    return found


@st.composite
def sums(draw):
    """(how many shards each rank has in one sum after the other, elements, dtype, seed)."""
    world_size, extra = draw(st.integers(1, 5)), draw(st.integers(0, 11))
    shards = world_size + extra
    inner_ends = {"min_size": world_size - 1, "max_size": world_size - 1, "unique": True}
    ends = st.lists(st.integers(1, max(1, shards - 1)), **inner_ends).map(sorted)
    cuts = [
        [end - start for start, end in zip([0, *inner], [*inner, shards], strict=True)]
        for inner in draw(st.lists(ends, min_size=1, max_size=4))
    ]
    return cuts, draw(st.integers(0, 40)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))


@settings(max_examples=40)
@given(sums())
@example(([[2, 2, 2, 2], [1, 2, 2, 3]], 1001, "float32", 17))
@example(([[1, 1, 1, 1]], 3, "bfloat16", 17))
def test_spans_may_change_between_sums(ranks, drawn):
    """Hypothesis looks for shards, ranks, elements or a cut whose sum has other bits: odd lengths,
    some shorter than the world, and 0; infinities, NaNs and signed zeros.
    """
    cuts, world_size = drawn[0], len(drawn[0][0])
    assert ranks.run(world_size, sums_on_this_rank, *drawn) == [[True] * (2 * len(cuts))] * world_size


def sum_through_a_broken_group(member):
    exchange = Exchange(shards=2, world_size=2, rank=member.rank, group=member.group)
    broken = patch("torch.distributed.all_reduce", side_effect=RuntimeError("Connection closed by peer"))
    with broken, pytest.raises(PeerLost) as raised:
        exchange.sum({(member.rank, 1): torch.zeros(3)}, "a test")
    return str(raised.value)


def test_a_collective_that_fails_blames_the_peer(ranks):
    """gloo reports a dead peer as RuntimeError; PeerLost says during what. Whatever else is raised
    stays what it is: test_worker_error.py.
    """
    lost = "another worker went away during a test: Connection closed by peer"
    assert ranks.run(2, sum_through_a_broken_group) == [lost] * 2


@given(st.lists(st.floats(width=64) | st.integers(-(2**63), 2**63 - 1)), st.integers(1, 3))
def test_words_keep_their_bits_in_a_sum_of_float32(values, world_size):
    """Of losses and ballots: each is 0 on all ranks but one."""
    words = [struct.unpack("<q", struct.pack("<d" if isinstance(v, float) else "<q", v))[0] for v in values]

    def of_rank(rank):
        own = [word * (place % world_size == rank) for place, word in enumerate(words)]
        return encode(torch.tensor(own, dtype=torch.int64), [1])

    found, counts = decode(sum(map(of_rank, range(world_size))).tolist(), len(words))
    assert found == [word % 2**64 for word in words] and counts == [world_size]
