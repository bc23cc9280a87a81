"""Each shard starts from the step's opening buffers; a step ends with the mean over shards.

The mean is that of what the buffers became on each shard. For BatchNorm's running averages this is
exactly one update with the mean of the shards' statistics. Integer buffers, such as the number of
batches seen, are taken from shard 0. A buffer that no forward changed keeps its bits.

It does not make BatchNorm's forward see the global batch: within a step each shard normalises by
its own statistics, so that they do not depend on which rank holds it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from elastic.reduce.bucket import cut

HALF_BITS = 32


class Buffers:
    """The buffers of some modules, from step to step; complex ones as pairs of reals."""

    def __init__(self, modules: Iterable[nn.Module], shards: int, device: torch.device) -> None:
        unique = {id(b): b for module in modules for b in module.buffers() if b is not None}
        real = [torch.view_as_real(b) if b.is_complex() else b for b in unique.values()]
        self._floats = [b for b in real if b.is_floating_point()]
        self._ints = [b for b in real if not b.is_floating_point()]
        # The sum is float64. There the mean of S equal float32 (or narrower) values is that value,
        # exactly: the product S·x fits into 53 bits. For float64 buffers it may round, so a flag
        # says whether any shard changed one.
        self._wide = [b for b in self._floats if b.dtype == torch.float64]
        self._shards = shards
        self._device = device
        self._opening: list[Tensor] = []

    @property
    def length(self) -> int:
        """Numbers that a shard contributes to the end-of-step all-reduce."""
        return _count(self._floats) + 2 * _count(self._ints) + len(self._wide)

    def begin_step(self) -> None:
        """Take what the buffers hold now as the start of each of the step's shards."""
        self._opening = self.save()

    def save(self) -> list[Tensor]:
        return [b.detach().clone() for b in self._all]

    def load(self, values: list[Tensor] | None = None) -> None:
        """Give the buffers these values, by default the opening ones."""
        for buffer, value in zip(self._all, self._opening if values is None else values, strict=True):
            # Writing through .data leaves autograd's version counter alone. With a plain copy_ the
            # backward of an earlier shard would refuse to run, because a buffer that its graph
            # saved has changed. It is safe: in training mode no backward reads the running
            # averages.
            buffer.data.copy_(value)

    def contribution(self, values: list[Tensor], shard: int) -> Tensor:
        """float64 [length]: what one shard adds to the end-of-step all-reduce.

        Floats, then the high halves of shard 0's integers, then their low halves, then 1 for each
        float64 buffer that this shard changed.
        """
        split = len(self._floats)
        floats, ints = _flat(values[:split], torch.float64), _flat(values[split:], torch.int64)
        # A float64 does not hold every int64 exactly; its high and low 32 bits do fit.
        high = ints >> HALF_BITS
        halves = torch.cat([high, ints - (high << HALF_BITS)]).double() * (shard == 0)
        changed = [
            (value != opening).any().double().reshape(1)
            for value, opening in zip(values[:split], self._opening, strict=False)
            if value.dtype == torch.float64
        ]
        return torch.cat([part.to(self._device) for part in [floats, halves, *changed]])

    def end_step(self, total: Tensor) -> None:
        """Set every buffer from the sum of all shards' contributions, float64 [length]."""
        changes = total[total.numel() - len(self._wide) :].tolist()
        changed = dict(zip(map(id, self._wide), changes, strict=True))
        num_floats, num_ints = _count(self._floats), _count(self._ints)
        means = total[:num_floats] / self._shards
        high, low = total[num_floats : num_floats + 2 * num_ints].long().view(2, -1)
        values = [*cut(means, self._floats), *cut((high << HALF_BITS) + low, self._ints)]
        with torch.no_grad():
            for buffer, value, opening in zip(self._all, values, self._opening, strict=True):
                buffer.copy_(opening if changed.get(id(buffer)) == 0 else value)

    @property
    def _all(self) -> list[Tensor]:
        return [*self._floats, *self._ints]


def _flat(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    flats = [value.reshape(-1) for value in values] or [torch.zeros(0)]
    return torch.cat(flats).to(dtype)


def _count(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
