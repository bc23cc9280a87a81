"""A sharded tensor is cut along its first dimension, and each rank holds a part of its rows.

It is a DTensor of torch, as `torch.distributed.fsdp.fully_shard` makes them. DTensor is asked for
by what it has, since its import takes a second, which a run without sharded modules does not spend.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from elastic.snapshot.division import chunk

T = TypeVar("T", bound=Tensor)
WORDS = 1 << 64  # sums of checksums wrap here
_WHOLE = Tensor, nn.Parameter
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_sharded(tensor: object) -> TypeGuard[Any]:
    return type(tensor) not in _WHOLE and hasattr(tensor, "placements")


def whole_of(tensors: list[T]) -> list[T]:
    """Those that are not sharded: the same list where none is."""
    return [each for each in tensors if not is_sharded(each)] if any(map(is_sharded, tensors)) else tensors


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in the same memory; a tensor that is not sharded, itself."""
    return tensor.detach()._local_tensor if is_sharded(tensor) else tensor  # noqa: SLF001 - `to_local` enters a graph


@torch.no_grad()
def as_sharded(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor cut as `like` is, of its shape: a view of this rank's rows."""
    rows = own_rows(tensor.shape[0], like)
    return of_rows(tensor[rows.start : rows.stop], like, tensor.shape)


def own_rows(rows: int, like: Any) -> range:
    """Those of a tensor of so many rows that this rank has, cut as `like` is."""
    return chunk(rows, like.device_mesh.get_local_rank(), like.device_mesh.size())


def is_cut_by_rows(tensor: Any) -> bool:
    """Whether each rank holds the rows that torch.chunk gives it; a view may be cut otherwise."""
    (placement,) = tensor.placements
    return placement.is_shard(0) and len(local(tensor)) == len(own_rows(tensor.shape[0], tensor))


@torch.no_grad()
def of_rows(own: Tensor, like: Any, shape: Sequence[int]) -> Tensor:
    """A sharded tensor of this shape, cut as `like` is, of this rank's rows, in their memory.

    That may be host memory, also where the mesh is of GPUs: `from_local` would copy it there.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), stride, own.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    made: Tensor = type(like)(own, spec, requires_grad=False)
    return made


def row_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """`row_words` of those that are sharded, by name."""
    found = {name: row_words(each) for name, each in tensors.items() if is_sharded(each)}
    there = [each.to(next(iter(found.values())).device) for each in found.values()]
    return dict(zip(found, torch.stack(there).tolist() if there else [], strict=True))


def row_words(tensor: Any) -> Tensor:
    """int64 []: a checksum of this rank's rows, which adds up over ranks to that of the whole
    tensor: sums of each row's words, times an odd number for each row. It wraps around.
    """
    own, rows = local(tensor).detach().contiguous(), own_rows(tensor.shape[0], tensor)
    row_bytes = math.prod(own.shape[1:]) * own.itemsize
    if not own.numel():
        return own.new_zeros((), dtype=torch.int64)
    word = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    if own.storage_offset() * own.itemsize % word:
        own = own.clone()
    words = own.reshape(-1).view(_WORDS[word]).view(len(rows), -1)
    sums = words.sum(1, dtype=torch.int64)
    return (sums * (2 * torch.arange(rows.start, rows.stop, device=own.device) + 1)).sum()
