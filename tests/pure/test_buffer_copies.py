"""Copies that a few calls make together are those that one call for each would make."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.train.step.buffer_copies import BufferCopies
from elastic.train.step.same_bits import differ

SHAPES = st.sampled_from([(), (0,), (1,), (5,), (2, 3), (4, 1)])
TYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)


@given(st.lists(st.tuples(SHAPES, TYPES), max_size=12), st.integers(0, 2**20))
def test_copies_have_the_bits_the_shapes_and_the_types_of_each(kinds, seed):
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=draw).to(dtype) for shape, dtype in kinds]
    copies = BufferCopies(tensors).take(tensors)
    assert [(each.shape, each.dtype) for each in copies] == [(each.shape, each.dtype) for each in tensors]
    assert not any(differ(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_a_copy_stays_as_it_was_taken_and_keeps_signs_of_zeros():
    tensors = [torch.tensor([-0.0, math.nan]), torch.tensor([1.0]), torch.tensor(3), torch.tensor(4)]
    copies = BufferCopies(tensors)
    first = copies.take(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert math.copysign(1, first[0][0]) == -1
    assert [each.tolist() for each in first[1:]] == [[1.0], 3, 4]
    assert [each.tolist() for each in copies.take(tensors)[1:]] == [[0.0], 0, 0]


@pytest.mark.parametrize("how", ["other memory", "other shape", "fewer numbers", "not dense"])
def test_a_tensor_that_a_forward_gave_other_memory_or_another_shape_is_copied_as_it_is(how):
    """A view of the memory that was found first would give the numbers from before."""
    tensors = [torch.arange(4.0), torch.arange(4.0)]
    copies = BufferCopies(tensors)
    match how:
        case "other memory":
            tensors[0].data = torch.full((4,), 7.0)
        case "other shape":
            tensors[0].data = tensors[0].data.view(2, 2)
        case "fewer numbers":
            tensors[0].resize_(2)
        case _:
            tensors[0].data = torch.arange(8.0)[::2]
    found = copies.take(tensors)
    assert found[0].shape == tensors[0].shape
    assert torch.equal(found[0], tensors[0])
    assert torch.equal(found[1], torch.arange(4.0))
