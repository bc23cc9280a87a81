"""The norm of gradients is a tree sum over the rows of each, so that it has the same bits anywhere.

Each row's squares are added up in float64, by halves of the row: additions of vectors, whose bits
depend on no kernel. The sums of all rows, which ranks tell each other, are added up in the same
way, in the order of the parameters.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from elastic.errors import UsageError
from elastic.reduce.exchange import all_gather, peers_may_die
from elastic.snapshot.sharded import is_sharded, local
from elastic.train.misuse import public

# Around the gather of norms, where sharded modules set it: a rank that waits for others in a
# forward of its own must learn that this one went on.
gathering: Callable[[], AbstractContextManager[None]] = nullcontext


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
        return torch.zeros((), dtype=torch.float64, device=listed[0].device if listed else None)
    norm = halves(torch.cat(squares_of_rows(gradients))[None]).sqrt().squeeze()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for each in gradients:
        local(each).mul_(scale.to(each.device, each.dtype))
    return norm


def squares_of_rows(gradients: Sequence[Tensor]) -> list[Tensor]:
    """float64 [rows] of each: the sum of the squares of each row. Raises PeerLost."""
    found = []
    for each in gradients:
        own = local(each)
        found.append(halves((own.flatten(1) if own.dim() > 1 else own.reshape(-1, 1)).double().square()))
    if sharded := [number for number, each in enumerate(gradients) if is_sharded(each)]:
        mesh: Any = gradients[sharded[0]].device_mesh  # type: ignore[attr-defined]
        most = [-(-gradients[number].shape[0] // mesh.size()) for number in sharded]
        rows = zip((found[number] for number in sharded), most, strict=True)
        own = torch.cat([pad(each, (0, size - len(each))) for each, size in rows])
        every = own.new_empty(mesh.size() * len(own))
        with peers_may_die("the norm of gradients"), gathering():
            all_gather(every, own, group=mesh.get_group())
        for number, of_ranks in zip(sharded, torch.split(every.view(mesh.size(), -1), most, 1), strict=True):
            found[number] = of_ranks.reshape(-1)[: gradients[number].shape[0]]
    return found


def halves(rows: Tensor) -> Tensor:
    """[n] of [n, m]: the sum of each row, the second half added to the first until one is left."""
    while (size := rows.shape[1]) > 1:
        half = (size + 1) // 2
        sums = rows[:, :half].clone()
        sums[:, : size - half] += rows[:, half:]
        rows = sums
    return rows.squeeze(1) if rows.shape[1] else rows.sum(1)
