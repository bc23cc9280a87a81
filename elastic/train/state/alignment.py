"""Where a tensor begins in its memory is part of what its numbers become.

Kernels for vectors take the elements up to the next boundary by themselves, so that a sum over a
tensor that begins elsewhere is rounded otherwise (MKL's dot and matrix products do). torch begins
its own memory on a boundary. A view of a part of it may begin anywhere, such as a parameter that
`vector_to_parameters` cut from a vector, or a kept gradient, which is cut from that of all. A
restart has to give it back there.

Counted is from the beginning of that memory. What other programs allocated (an array of NumPy) may
begin anywhere, in each process elsewhere, and ranks would seem to have different states.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

BOUNDARY = 64  # bytes; torch's allocator of the CPU keeps it, and that of GPUs one of 512


def alignment(tensor: Tensor) -> int:
    """Bytes from the last boundary before its first element to that, in its memory."""
    return int(tensor.storage_offset()) * tensor.itemsize % BOUNDARY


def alignments(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """By name, where it is not 0."""
    return {name: found for name, tensor in tensors.items() if (found := alignment(tensor))}


def misplaced(saved: Mapping[str, int] | None, now: Mapping[str, int] | None) -> list[str]:
    """Names of tensors that have another alignment now. None: not known, and so is the answer."""
    if saved is None or now is None:
        return []
    return sorted(name for name in {*saved, *now} if saved.get(name, 0) != now.get(name, 0))


def copy_at(tensor: Tensor, place: int) -> Tensor:
    """A copy of the same strides, but for gaps, in memory of its own, of which `alignment` is
    `place`. place: bytes, a multiple of an element's.
    """
    like = torch.empty_like(tensor, requires_grad=False)
    if place:
        first = place // tensor.itemsize
        memory = like.new_empty(first + tensor.numel())
        like = memory.as_strided(like.shape, like.stride(), first)
    return like.copy_(tensor.detach())
