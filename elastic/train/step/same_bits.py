"""Contents are the same if their bits are: NaNs are equal, zeros of two signs are not."""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether two tensors of one shape and type have other bits: bool [], without a wait for it."""
    reals = [_real(each.detach()) for each in (one, other)]
    size = reals[0].element_size()
    bits = [real.view(_BITS[size]) for real in reals]
    if all(map(_has_words, reals)):  # bytes one by one take ten times as long
        bits = [real.view(-1).view(torch.int64) for real in reals]
    if bits[0].device.type == "cpu":  # in half the time
        return torch.tensor(not torch.equal(*bits))
    return (bits[0] != bits[1]).any()


def _has_words(tensor: Tensor) -> bool:
    size = tensor.element_size()
    ends = tensor.storage_offset() * size, tensor.numel() * size
    return tensor.is_contiguous() and all(end % 8 == 0 for end in ends)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
