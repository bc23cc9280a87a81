"""The tree sum beside a dumb twin: the same bits for every number of leaves and for every way to
spread them over ranks.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from elastic.reduce.tree import Stack, fold, span, total

floats = st.floats(width=32)  # infinities, NaNs, denormals and both zeros are among them
vectors = st.integers(1, 16).flatmap(lambda shards: arrays.arrays(np.float32, (shards, 3), elements=floats))


def dumb_twin(leaves):
    """Cut at the largest power of two below the number of leaves; no blocks, no stack, no ranks."""
    if len(leaves) == 1:
        return leaves[0]
    half = max(2**k for k in range(5) if 2**k < len(leaves))
    with np.errstate(all="ignore"):
        return dumb_twin(leaves[:half]) + dumb_twin(leaves[half:])


def add(left, right):
    with np.errstate(all="ignore"):
        return left + right


def assert_same_bits(found, expected):
    """Which of two NaNs a sum passes on is open in IEEE 754, so that all NaNs count as one."""
    same = found.view(np.uint32) == expected.view(np.uint32)
    assert (same | (np.isnan(found) & np.isnan(expected))).all(), (found, expected)


@given(vectors, st.data())
def test_sum_has_the_bits_of_the_dumb_twin_at_every_world_size(leaves, data):
    """Each world size cuts the leaves elsewhere, and any other rule of who owns what must not
    matter either; ranks hand in their blocks in any order.
    """
    shards = len(leaves)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, shards - 1)))), shards] if shards > 1 else [0, 1]
    owned = [[span(shards, ranks, rank) for rank in range(ranks)] for ranks in range(1, shards + 1)]
    for spans in [*owned, [range(start, stop) for start, stop in pairwise(cuts)]]:
        parts = {}
        for number, own in reversed(list(enumerate(spans))):
            stack = Stack(add)
            for leaf in own if number % 2 else own[::-1]:
                stack.push((leaf, 1), leaves[leaf])
            parts |= stack.parts
        assert_same_bits(fold(parts, shards, add), dumb_twin(list(leaves)))
    numbers = leaves[:, 0].tolist()
    assert repr(total(numbers)) == repr(dumb_twin(numbers))


@pytest.mark.parametrize("missing", [0, 2, 5])
def test_a_missing_leaf_fails_an_assertion(missing):
    """A sum over fewer leaves than there are would train on, silently wrong."""
    parts = {(leaf, 1): np.float32(1) for leaf in range(6) if leaf != missing}
    with pytest.raises(AssertionError, match="do not cover 6 leaves"):
        fold(parts, 6, add)
