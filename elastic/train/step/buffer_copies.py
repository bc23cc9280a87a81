"""Copies of many small tensors are made by a few calls, and not by one for each.

A model has more buffers than anything else that is copied for each shard (159 in a ResNet-50), most
of them with a few numbers: the calls cost more than the bytes. Copies have the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class BufferCopies:
    """Of these tensors, as long as each keeps its memory and shape; of others, one by one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = _places(tensors)
        alike: dict[tuple[object, ...], list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor.ndim < 2 and tensor.is_contiguous():  # else a part has another shape
                alike.setdefault((tensor.ndim, tensor.dtype, tensor.device), []).append(i)
        self._groups = [
            (group, [tensors[i].data.view(-1) for i in group], [tensors[i].numel() for i in group])
            for group in alike.values()
        ]
        together = {i for group in alike.values() for i in group}
        self._alone = [i for i in range(len(tensors)) if i not in together]

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A copy of what each holds now; those of one type are parts of one tensor."""
        if _places(tensors) != self._places:  # a forward gave one other memory
            return [tensor.detach().clone() for tensor in tensors]
        found = list(tensors)
        for group, flat, sizes in self._groups:
            joined = torch.cat(flat)
            has_length = tensors[group[0]].ndim > 0
            parts = torch.split_with_sizes(joined, sizes) if has_length else joined.unbind()
            for i, part in zip(group, parts, strict=True):
                found[i] = part
        for i in self._alone:
            found[i] = tensors[i].detach().clone()
        return found


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], list[torch.Size], list[bool]]:
    shapes = [tensor.shape for tensor in tensors]
    return list(map(Tensor.data_ptr, tensors)), shapes, list(map(Tensor.is_contiguous, tensors))
