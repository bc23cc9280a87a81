"""For drills: one bit of a training state changes, as faulty memory or arithmetic changes it.

PyTorch does not notice: the write goes past autograd's count of changes.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from elastic.errors import UsageError
from elastic.snapshot.sharded import local

BIT = 0x20  # of the second highest byte: far from the lowest bits, and never a NaN for small numbers


def flip(tensors_of: Callable[[str], Iterable[Tensor]], target: str) -> None:
    """Flip a bit in the largest tensor of `parameters` or `optimizer`, or of the next `gradient`.

    The next gradient is that of the shard whose backward comes first. Raises UsageError when there
    is no such tensor.
    """
    found = max(tensors_of(target), key=lambda tensor: local(tensor).nbytes, default=None)
    if found is None or not local(found).numel():
        raise UsageError(f"fault plan: expected {target} to flip a bit in, found no tensor")
    if target != "gradient":
        flip_bit(local(found))
        return

    def flipped(gradient: Tensor) -> Tensor:
        hook.remove()
        wrong = gradient.detach().clone()
        flip_bit(wrong)
        return wrong

    hook: RemovableHandle = found.register_hook(flipped)  # type: ignore[no-untyped-call]


def flip_bit(tensor: Tensor) -> None:
    """In the middle of the tensor's memory, whatever its strides."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    size = tensor.element_size()
    at = (tensor.storage_offset() + tensor.numel() // 2) * size + max(0, size - 2)
    memory[at] ^= BIT
