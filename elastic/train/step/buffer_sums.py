"""What buffers became is one float64 vector of each shard, whose sum over shards says all of it.

The sum is float64. There the mean of S equal float32 (or narrower) values is that value, exactly:
the product S·x fits into 53 bits. For float64 buffers it may round, so a flag says whether any
shard changed one. Integers must be the same on every shard: shard 0 gives them, and hashes show
whether the others have the same.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

HALF_BITS = 32
# S·Σh² and (Σh)² are exact in float64 if S·h fits into 26 bits.
HASH_BITS = 26
MIX = 0x9E3779B97F4A7C15 - 2**64  # odd, from the golden ratio (Knuth's multiplicative hashing)


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
        self._sizes = [
            sum(_real(tensors[i]).numel() for i in which)
            for which in (self.floats, self.integers, self.integers)
        ]
        self.length = sum(self._sizes) + len(self._flagged) + (4 if self.integers else 0)

    def contributions(
        self, after: Mapping[int, Sequence[Tensor]], opening: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """float64 [length] for each shard: what it adds to the sum.

        after: the values of the buffers, by shard. opening: those that each shard began with.
        Floats, then the high halves of shard 0's integers, then their low halves. Behind these are
        signs: 1 for each float64 buffer, and each that is not summed, that this shard changed, then
        two hashes of all its integers and the square of each.
        """
        if not self.length:
            return {shard: torch.zeros(0, dtype=torch.float64, device=self._device) for shard in after}
        integers = {shard: _flat(values, self.integers).long() for shard, values in after.items()}
        rows = torch.stack(list(integers.values()))
        hashes = self._hashes(rows) if self.integers else rows.new_zeros(len(rows), 0, dtype=torch.float64)
        found = {}
        for index, (shard, values) in enumerate(after.items()):
            flags = torch.zeros(len(self._flagged), dtype=torch.float64, device=self._device)
            for flag, i in enumerate(self._flagged):
                if values[i] is not opening[i]:
                    flags[flag] = (values[i] != opening[i]).any()
            halves = _halves(integers[shard], is_counted=shard == 0)
            parts = [_flat(values, self.floats).double(), halves, flags, hashes[index]]
            found[shard] = torch.cat([part.to(self._device) for part in parts])
        return found

    def signs(self, total: Tensor) -> Tensor:
        """float64 [n]: what the host must know of the sum of all shards' contributions."""
        return total[sum(self._sizes) :]

    def changed(self, signs: Sequence[float]) -> set[int]:
        """Of those that have a flag, the ones that a shard of any rank changed."""
        return {i for i, count in zip(self._flagged, signs, strict=False) if count}

    def use(self, tensors: Sequence[Tensor], total: Tensor, signs: Sequence[float]) -> None:
        """Set the buffers, which have their opening values, from the sum, float64 [length].

        signs: read from it.
        """
        means, high, low = torch.split(total[: sum(self._sizes)], self._sizes)
        is_unchanged = set(self._flagged) - self.changed(signs)
        integers = (high.long() << HALF_BITS) + low.long()
        with torch.no_grad():
            for which, flat in ((self.floats, means / self._shards), (self.integers, integers)):
                of_these = [_real(tensors[i]) for i in which]
                for i, tensor, value in zip(which, of_these, _cut(flat, of_these), strict=True):
                    if i not in is_unchanged:
                        tensor.copy_(value)

    def have_same_integers(self, signs: Sequence[float]) -> bool:
        """Whether the integers of all shards are the same. signs: as for `use`.

        By the inequality of Cauchy and Schwarz, S·Σh² = (Σh)² only where all h are equal.
        """
        if not self.integers:
            return True
        one, one_squares, other, other_squares = signs[len(self._flagged) :]
        return self._shards * one_squares == one * one and self._shards * other_squares == other * other

    def _hashes(self, rows: Tensor) -> Tensor:
        """float64 [rows, 4]: h and h² of each row of int64 [rows, n], for two hashes.

        One has 25 bits at most: among 30 522 places some pairs of counts would have the same.
        """
        if not len(self._weights):
            # Of weights in proportion to the place, [0, 2] and [1, 0] would have one sum.
            places = torch.arange(1, rows.shape[1] + 1, device=rows.device) * MIX
            one = (places ^ places >> HALF_BITS) * MIX
            self._weights = torch.stack([one, (one ^ one >> HALF_BITS) * MIX]) | 1
        bits = HASH_BITS - (self._shards - 1).bit_length()
        # The top bits: each bit of each integer reaches one of them.
        sums = [(rows * weights).sum(1) for weights in self._weights]
        one, other = [(each >> (64 - bits) & ((1 << bits) - 1)).double() for each in sums]
        return torch.stack([one, one * one, other, other * other], dim=1)


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector cut into views of the shapes of `like`."""
    parts = flat.split_with_sizes([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _real(tensor: Tensor) -> Tensor:
    """A complex one as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(values: Sequence[Tensor], which: list[int]) -> Tensor:
    """[numbers]: these values one after another."""
    flat = [_real(values[i]).reshape(-1) for i in which]
    return torch.cat(flat) if flat else torch.zeros(0)


def _halves(integers: Tensor, *, is_counted: bool) -> Tensor:
    """float64 [2 n] of int64 [n].

    A float64 does not hold every int64 exactly; its high and low 32 bits do fit.
    """
    if not is_counted:
        return integers.new_zeros(2 * len(integers), dtype=torch.float64)
    high = integers >> HALF_BITS
    return torch.cat([high, integers - (high << HALF_BITS)]).double()
