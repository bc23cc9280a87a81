"""What buffers became is one float64 vector of each shard, whose sum over shards says all of it.

The sum is float64. There the mean of S equal float32 (or narrower) values is that value, exactly:
the product S·x fits into 53 bits. For float64 buffers it may round, so a flag says whether any
shard changed one. Integers must be the same on every shard, and are not summed: each shard has a
place for a hash of them, so that every rank can compare all.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic.reduce.exchange import PIECES, pieces

_MIX = 0x9E3779B97F4A7C15 - 2**64  # odd, from the golden ratio (Knuth's multiplicative hashing)


class BufferSums:
    """Of some buffers, for S shards.

    summed: which of them the sum has; of the others it says only whether a shard changed one.
    floats, integers: of those that are summed. length: numbers that a shard contributes.
    """

    def __init__(
        self, tensors: Sequence[Tensor], summed: set[int], shards: int, device: torch.device
    ) -> None:
        """device: of the contributions."""
        self.summed = summed
        self._shards = shards
        self._device = device
        kinds = [t.is_floating_point() or t.is_complex() for t in tensors]
        self.floats = [i for i in sorted(summed) if kinds[i]]
        self.integers = [i for i in sorted(summed) if not kinds[i]]
        wide = torch.float64, torch.complex128
        self._flagged = [i for i, t in enumerate(tensors) if i not in summed or t.dtype in wide]
        self._weights = torch.empty(0)  # of the hashes of all integers
        self._num_floats = sum(_real(tensors[i]).numel() for i in self.floats)
        self.length = self._num_floats + len(self._flagged) + PIECES * shards * bool(self.integers)

    def contributions(
        self, after: Mapping[int, Sequence[Tensor]], opening: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """float64 [length] for each shard: what it adds to the sum.

        after: the values of the buffers, by shard. opening: those that each shard began with.
        Floats, then signs: 1 for each float64 buffer, and each that is not summed, that this shard
        changed; and a place for the hash of each shard's integers.
        """
        found = {}
        for shard, values in after.items():
            flags = torch.zeros(len(self._flagged), dtype=torch.float64, device=self._device)
            for flag, i in enumerate(self._flagged):
                if values[i] is not opening[i]:
                    flags[flag] = (values[i] != opening[i]).any()
            parts = [_flat(values, self.floats).double(), flags]
            if self.integers:
                places = flags.new_zeros(self._shards, PIECES)
                places[shard] = pieces(self._hash(_flat(values, self.integers).long()))
                parts.append(places.view(-1))
            found[shard] = torch.cat([part.to(self._device) for part in parts])
        return found

    def signs(self, total: Tensor) -> Tensor:
        """float64 [n]: what the host must know of the sum of all shards' contributions."""
        return total[self._num_floats :]

    def changed(self, signs: Sequence[float]) -> set[int]:
        """Of those that have a flag, the ones that a shard of any rank changed."""
        return {i for i, count in zip(self._flagged, signs, strict=False) if count}

    def have_same_integers(self, signs: Sequence[float]) -> bool:
        """Whether the integers of all shards are the same. signs: of the sum."""
        hashes = signs[len(self._flagged) :]
        return all(len(set(hashes[i::PIECES])) < 2 for i in range(PIECES))

    def use(
        self, tensors: Sequence[Tensor], total: Tensor, signs: Sequence[float], left: Sequence[Tensor]
    ) -> None:
        """Set the buffers, which have their opening values, from the sum, float64 [length].

        signs: read from it. left: what a shard left, for integers, which are the same in all.
        """
        is_unchanged = set(self._flagged) - self.changed(signs)
        of_these = [_real(tensors[i]) for i in self.floats]
        means = total[: self._num_floats] / self._shards
        parts = means.split_with_sizes([each.numel() for each in of_these])
        with torch.no_grad():
            for i, tensor, mean in zip(self.floats, of_these, parts, strict=True):
                if i not in is_unchanged:
                    tensor.copy_(mean.view_as(tensor))
            for i in self.integers:
                tensors[i].copy_(left[i].view_as(tensors[i]))

    def _hash(self, integers: Tensor) -> Tensor:
        """int64 [] of int64 [n]."""
        if not len(self._weights):
            # Of weights in proportion to the place, [0, 2] and [1, 0] would have one sum.
            places = torch.arange(1, len(integers) + 1, device=integers.device) * _MIX
            self._weights = (places ^ places >> 32) * _MIX | 1
        return (integers * self._weights).sum()


def _real(tensor: Tensor) -> Tensor:
    """A complex one as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(values: Sequence[Tensor], which: list[int]) -> Tensor:
    """[numbers]: these values one after another."""
    flat = [_real(values[i]).reshape(-1) for i in which]
    return torch.cat(flat) if flat else torch.zeros(0)
