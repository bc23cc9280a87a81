"""What buffers became is one float64 vector of each shard, whose sum over shards says all of it.

The sum is float64. There the mean of S equal float32 (or narrower) values is that value, exactly:
the product S·x fits into 53 bits. For float64 buffers it may round, so a flag says whether any
shard changed one. Integers must be the same on every shard: shard 0 gives them, and hashes show
whether the others have the same.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic.reduce.bucket import cut

HALF_BITS = 32
# S·Σh² and (Σh)² are exact in float64 if S·h fits into 26 bits.
HASH_BITS = 26
MIX = 0x9E3779B97F4A7C15 - 2**64  # odd, from the golden ratio (Knuth's multiplicative hashing)


class BufferSums:
    """Of some buffers, for S shards.

    length: numbers that a shard contributes. num_values: of them, those that make up the buffers,
    which come first. The others are signs: of each float64 buffer, and four of all integers.
    """

    def __init__(self, tensors: Sequence[Tensor], shards: int, device: torch.device) -> None:
        """device: of the contributions."""
        self._tensors = tensors
        self._shards = shards
        self._device = device
        kinds = [t.is_floating_point() or t.is_complex() for t in tensors]
        self._floats = [i for i, is_float in enumerate(kinds) if is_float]
        self._ints = [i for i, is_float in enumerate(kinds) if not is_float]
        self._wide = [i for i in self._floats if tensors[i].dtype in (torch.float64, torch.complex128)]
        self._weights: dict[int, Tensor] = {}  # of the hashes of so many integers
        self._num_floats, self._num_ints = self._count(self._floats), self._count(self._ints)
        self.num_values = self._num_floats + 2 * self._num_ints
        self.length = self.num_values + len(self._wide) + (4 if self._ints else 0)

    def contributions(
        self, after: Mapping[int, Sequence[Tensor]], opening: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """float64 [length] for each shard: what it adds to the sum.

        after: the values of the buffers, by shard. opening: those that each shard began with.
        Floats, then the high halves of shard 0's integers, then their low halves, then 1 for each
        float64 buffer that this shard changed, then two hashes of all its integers and the square
        of each. It is of another length where a forward gave a buffer another size.
        """
        if not self._tensors or not after:  # a rank without a shard adds nothing
            return {shard: torch.zeros(0, dtype=torch.float64, device=self._device) for shard in after}
        integers = {shard: _flat(values, self._ints).long() for shard, values in after.items()}
        hashes = self._hashes(torch.stack(list(integers.values()))) if self._ints else ()
        found = {}
        for index, (shard, values) in enumerate(after.items()):
            parts = [_flat(values, self._floats).double()]
            if self._ints:
                parts.append(_halves(integers[shard], is_counted=shard == 0))
            parts += [(values[i] != opening[i]).any().double().reshape(1) for i in self._wide]
            if self._ints:
                parts.append(hashes[index])
            found[shard] = torch.cat([part.to(self._device) for part in parts])
        return found

    def use(self, total: Tensor, signs: Sequence[float]) -> None:
        """Set the buffers, which have their opening values, from the sum, float64 [length].

        signs: read from it, and perhaps others behind them.
        """
        if not self._tensors:
            return
        sizes = [self._num_floats, self._num_ints, self._num_ints]
        means, high, low = torch.split(total[: self.num_values], sizes)
        is_changed = dict(zip(self._wide, signs, strict=False))
        integers = (high.long() << HALF_BITS) + low.long()
        with torch.no_grad():
            for which, flat in ((self._floats, means / self._shards), (self._ints, integers)):
                tensors = [_real(self._tensors[i]) for i in which]
                for i, tensor, value in zip(which, tensors, cut(flat, tensors), strict=True):
                    if is_changed.get(i) != 0:
                        tensor.copy_(value)

    def have_same_integers(self, signs: Sequence[float]) -> bool:
        """Whether the integers of all shards are the same. signs: as for `use`.

        By the inequality of Cauchy and Schwarz, S·Σh² = (Σh)² only where all h are equal.
        """
        if not self._ints:
            return True
        one, one_squares, other, other_squares = signs[len(self._wide) :][:4]
        return self._shards * one_squares == one * one and self._shards * other_squares == other * other

    def hashes(self, values: Sequence[Tensor]) -> Tensor:
        """float64 [integer buffers, 4]: as in a contribution, but for each buffer by itself."""
        rows = [self._hashes(values[i].reshape(1, -1).long()) for i in self._ints]
        return torch.cat(rows).to(self._device)

    @property
    def like_hashes(self) -> Tensor:
        """A tensor of the form of `hashes`."""
        return torch.empty(len(self._ints), 4, dtype=torch.float64, device=self._device)

    def different_integers(self, total: Tensor) -> list[Tensor]:
        """The buffers whose integers differ, from the sum of all shards' `hashes`."""
        different = self._differ(total).tolist()
        return [self._tensors[i] for i, is_so in zip(self._ints, different, strict=True) if is_so]

    def _differ(self, total: Tensor) -> Tensor:
        sums, squares = total[:, ::2], total[:, 1::2]
        return (self._shards * squares != sums.square()).any(1)

    def _hashes(self, rows: Tensor) -> Tensor:
        """float64 [rows, 4]: h and h² of each row of int64 [rows, n], for two hashes.

        One has 25 bits at most: among 30 522 places some pairs of counts would have the same.
        """
        count = rows.shape[1]
        if count not in self._weights:
            # Of weights in proportion to the place, [0, 2] and [1, 0] would have one sum.
            places = torch.arange(1, count + 1, device=rows.device) * MIX
            one = (places ^ places >> HALF_BITS) * MIX
            self._weights[count] = torch.stack([one, (one ^ one >> HALF_BITS) * MIX]) | 1
        bits = HASH_BITS - (self._shards - 1).bit_length()
        # The top bits: each bit of each integer reaches one of them.
        sums = [(rows * weights).sum(1) for weights in self._weights[count]]
        one, other = [(each >> (64 - bits) & ((1 << bits) - 1)).double() for each in sums]
        return torch.stack([one, one * one, other, other * other], dim=1)

    def _count(self, which: list[int]) -> int:
        return sum(_real(self._tensors[i]).numel() for i in which)


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
