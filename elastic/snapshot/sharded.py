"""A sharded tensor is cut along its first dimension, and each rank holds a part of its rows.

It is a DTensor of torch, as `torch.distributed.fsdp.fully_shard` makes them. DTensor is asked for
by what it has, since its import takes a second, which a run without sharded modules does not spend.
"""

from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from elastic.errors import PeerLost

T = TypeVar("T", bound=Tensor)
_WHOLE = Tensor, nn.Parameter


def is_sharded(tensor: object) -> TypeGuard[Any]:
    return type(tensor) not in _WHOLE and hasattr(tensor, "placements")


def whole_of(tensors: list[T]) -> list[T]:
    """Those that are not sharded: the same list where none is."""
    return [each for each in tensors if not is_sharded(each)] if any(map(is_sharded, tensors)) else tensors


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in the same memory; a tensor that is not sharded, itself."""
    return tensor.detach()._local_tensor if is_sharded(tensor) else tensor  # noqa: SLF001 - `to_local` enters a graph


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All rows; of a tensor that is not sharded, itself. With several ranks in new memory.

    All ranks call it for the same tensors in the same order. Raises PeerLost.
    """
    if not is_sharded(tensor):
        return tensor
    try:
        found: Tensor = tensor.detach().full_tensor()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"another worker went away while a sharded tensor was gathered: {error}") from error
    return found


@torch.no_grad()
def as_sharded(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor cut as `like` is, of its shape: a view of this rank's rows."""
    mesh, rows = like.device_mesh, -(-tensor.shape[0] // like.device_mesh.size())
    first = min(mesh.get_local_rank() * rows, tensor.shape[0])
    own = tensor[first : first + rows]
    made: Tensor = type(like).from_local(
        own, mesh, like.placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )
    return made
