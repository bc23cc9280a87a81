"""What each rank tells the others at the end of a step: float32 numbers whose sums are exact.

They may ride in a bucket of gradients, whose sum adds them in some order. So each place is 0 on all
ranks but one, or small and whole. A number of 64 bits (a loss of a shard, a ballot) takes three
places of at most 22 bits, which a float32 holds.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

PIECES, PIECE_BITS = 3, 22
_MASK = (1 << PIECE_BITS) - 1


class Told(NamedTuple):
    """losses: of the shards; none where the loss is known. asks: for each request how many ranks
    make it. own_s: seconds, by rank, of few digits. ballots: by rank. used: for each parameter on
    how many ranks it has a gradient.
    """

    losses: Sequence[float]
    asks: Sequence[float]
    own_s: Sequence[float]
    ballots: Sequence[int]
    used: Sequence[float]


def encode(losses: Sequence[Tensor], said: Told, shards: range, of: int, device: torch.device) -> Tensor:
    """float32 [numbers], on the device.

    losses: of one number each, or none; said: all else that this rank tells. shards: whose losses
    they are, of `of` in all.
    """
    ballots = [float(ballot >> PIECE_BITS * i & _MASK) for ballot in said.ballots for i in range(PIECES)]
    numbers = torch.tensor([*said.asks, *said.own_s, *ballots, *said.used], dtype=torch.float32)
    numbers = numbers.to(device)
    if not losses:
        return numbers
    places = numbers.new_zeros(of, PIECES)
    words = torch.cat([each.reshape(1).to(device, torch.float64) for each in losses]).view(torch.int64)
    places[shards.start : shards.stop] = pieces(words)
    return torch.cat([places.view(-1), numbers])


def pieces(words: Tensor) -> Tensor:
    """int64 [..., PIECES] of int64 [...], each piece of PIECE_BITS."""
    return torch.stack([words >> PIECE_BITS * i & _MASK for i in range(PIECES)], -1)


def decode(sums: list[float], said: Told, shards: int) -> Told:
    """What all ranks told. sums: of their numbers. said: by this rank. shards: 0 without losses."""
    numbers = iter(sums)
    bits = _words(islice(numbers, PIECES * shards))
    return Told(
        losses=struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}Q", *bits)),
        asks=list(islice(numbers, len(said.asks))),
        own_s=list(islice(numbers, len(said.own_s))),
        ballots=_words(islice(numbers, PIECES * len(said.ballots))),
        used=list(numbers),
    )


def _words(numbers: Iterable[float]) -> list[int]:
    found = list(map(int, numbers))
    low, middle, high = (found[i::PIECES] for i in range(PIECES))
    # The last piece has two bits more than are left, copies of the sign.
    whole = (a | b << PIECE_BITS | c << 2 * PIECE_BITS for a, b, c in zip(low, middle, high, strict=True))
    return [word & (1 << 64) - 1 for word in whole]
