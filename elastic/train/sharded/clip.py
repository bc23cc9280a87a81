"""The norm of gradients is a tree sum over the rows of each, so that it has the same bits anywhere.

Each row's squares are added up in float64, by halves of the row: additions of vectors, whose bits
depend on no kernel. The sums of all rows, which ranks tell each other, are added up in the same
way, in the order of the parameters.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.snapshot.sharded import is_sharded, local, whole
from elastic.train.misuse import public


@public("elastic.clip_grad_norm_")
@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their norm, as of one vector, is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` with its norm of 2, for sharded parameters and others, with
    the same bits at every world size: every rank calls it alike. Parameters without a gradient do
    not count. Returns the norm before, float64 []. Raises UsageError unless `max_norm` is positive.
    """
    if not max_norm > 0:
        raise UsageError(f"elastic.clip_grad_norm_: expected a positive max_norm, found {max_norm}")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in listed if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norm = halves(torch.cat([row_sums(each) for each in gradients])[None]).sqrt().squeeze()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for each in gradients:
        local(each).mul_(scale.to(each.device, each.dtype))
    return norm


def row_sums(gradient: Tensor) -> Tensor:
    """float64 [rows]: the sum of the squares of each row."""
    own = local(gradient)
    rows = own.flatten(1) if own.dim() > 1 else own.reshape(-1, 1)
    sums = halves(rows.double().square())
    if not is_sharded(gradient):
        return sums
    mesh, shape = gradient.device_mesh, gradient.shape[:1]
    return whole(
        type(gradient).from_local(sums, mesh, gradient.placements, run_check=False, shape=shape, stride=(1,))
    )


def halves(rows: Tensor) -> Tensor:
    """[n] of [n, m]: the sum of each row, the second half added to the first until one is left."""
    while (size := rows.shape[1]) > 1:
        half = (size + 1) // 2
        sums = rows[:, :half].clone()
        sums[:, : size - half] += rows[:, half:]
        rows = sums
    return rows.squeeze(1) if rows.shape[1] else rows.sum(1)
