"""Every rank gets the root of the tree sum, bit for bit the same at every world size.

There are two ways, and each performs exactly the additions of the tree (tree.py):

- A world of two, each rank with one half, in order: one plain all-reduce. A sum of two numbers
  is the same in either order, whatever algorithm the library takes.
- Any other world: each rank receives its chunk of every block (all-to-all), folds the tree for that
  chunk, and all gather the finished chunks.

Spans may be others in each step (`divide`); every rank has a shard at least.

The library's own all-reduce is not used for more than two ranks: the order in which it adds depends
on the world size, the algorithm and the vector's length. With one block a rank each way moves
2·(W-1)/W of the vector per rank, as a ring all-reduce does; B blocks a rank move (B+1)·(W-1)/W.

What ranks tell each other beside gradients may ride in a bucket, whose sum adds it in some order.
So each number is 0 on all ranks but one, or small and whole, and one of 64 bits takes three places
(`encode`).

It does not promise to survive the death of a peer: that raises PeerLost, and the agent starts a new
generation.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.errors import PeerLost
from elastic.reduce.tree import Block, Stack, blocks, fold, span

# The second name is that of older versions of torch, and deprecated in newer ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


PIECES, PIECE_BITS = 3, 22  # of a word of 64 bits; a float32 holds each piece
_MASK = (1 << PIECE_BITS) - 1


@contextmanager
def peers_may_die(what: str) -> Iterator[None]:
    """Turns a collective's RuntimeError, which is how torch reports a dead peer, into PeerLost."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"another worker went away during {what}: {error}") from error


class Exchange:
    """The tree sum over the ranks of one process group; None is torch's default group."""

    def __init__(self, *, shards: int, world_size: int, rank: int, group: dist.ProcessGroup | None) -> None:
        self.shards = shards
        self.world_size = world_size
        self.rank = rank
        self._group = group
        self._is_gloo = world_size > 1 and dist.get_backend(group) == "gloo"
        self.divide([span(shards, world_size, r) for r in range(world_size)])

    def divide(self, spans: Sequence[range], *, is_reversed: bool = False) -> None:
        """From now on the shards of each rank are these; between two sums, alike on every rank.

        is_reversed: each rank computes its shards in the opposite order.
        """
        assert sorted(shard for each in spans for shard in each) == list(range(self.shards)), (
            "spans leave shards out"
        )
        assert all(spans), "a rank has no shard"
        self.is_reversed = is_reversed
        self.spans = tuple(spans)
        self.own_shards = self.spans[self.rank]
        self._blocks = [blocks(each) for each in self.spans]
        self.own_blocks = self._blocks[self.rank]
        half = self.shards // 2
        self._are_halves = self._blocks == [((0, half),), ((half, half),)]

    def sum_shards(self, of_shard: dict[int, Tensor], what: str) -> Tensor:
        """The tree sum of one tensor per own shard, in their order: on every rank, of their shape.

        All tensors have one shape, dtype and device; they are overwritten. `what` names the sum in
        an error. Raises PeerLost when another rank is gone.
        """
        form = next(iter(of_shard.values()))
        stack: Stack[Tensor] = Stack(Tensor.add_)
        for shard, value in of_shard.items():
            stack.push((shard, 1), value.reshape(-1))
        return self.sum_and_wait(stack.parts, what).view(form.shape)

    def sum_and_wait(self, parts: dict[Block, Tensor], what: str) -> Tensor:
        """As `sum`; the result is there when this returns, also on a GPU."""
        total = self.sum(parts, what)
        if self.world_size > 1 and total.device.type == "cuda":
            # nccl only queues the sum. Without this wait the host would stop for other ranks later,
            # in the middle of the recipe's code, where the agent takes a long stop for a hang.
            torch.cuda.current_stream(total.device).synchronize()
        return total

    def sum(self, parts: dict[Block, Tensor], what: str) -> Tensor:
        """The root of the tree over all ranks' parts: a vector, on the parts' device.

        parts: one contiguous vector per own block, all of one length and dtype; they are
        overwritten. `what`: as in `sum_shards`. Raises PeerLost when another rank is gone.
        """
        if self.world_size == 1:
            return fold(parts, self.shards, Tensor.add_)
        form = next(iter(parts.values()))
        if not form.numel():  # on every rank
            return form
        device = form.device
        if self._is_gloo and device.type != "cpu":  # gloo sends from and receives into host memory
            parts = {block: part.cpu() for block, part in parts.items()}
        if not self._are_halves:
            return self._by_chunks(parts, what).to(device)
        (total,) = parts.values()
        with peers_may_die(what):
            dist.all_reduce(total, group=self._group)
        return total.to(device)

    def _by_chunks(self, parts: dict[Block, Tensor], what: str) -> Tensor:
        """Each rank receives its chunk of all blocks and folds it; then all gather the chunks.

        The vector is cut into W chunks of equal length, the last one padded with zeros. Padding
        costs no bits: zeros are added to zeros and cut off at the end.
        """
        mine = self._blocks[self.rank]
        length = parts[mine[0]].numel()
        chunk = -(-length // self.world_size)
        padding = chunk * self.world_size - length
        padded = [
            torch.nn.functional.pad(parts[block], (0, padding)) if padding else parts[block] for block in mine
        ]
        send = padded[0]
        if len(mine) > 1:
            send = torch.cat([each.view(self.world_size, chunk) for each in padded], 1).view(-1)
        counts = [len(of_rank) for of_rank in self._blocks]
        receive = send.new_empty(sum(counts) * chunk)
        received, sent = [count * chunk for count in counts], [len(mine) * chunk] * self.world_size
        with peers_may_die(what):
            dist.all_to_all_single(receive, send, received, sent, group=self._group)
        every = [block for of_rank in self._blocks for block in of_rank]
        root = fold(dict(zip(every, torch.split(receive, chunk), strict=True)), self.shards, Tensor.add_)
        gathered = send[: chunk * self.world_size]  # all of it has been sent
        with peers_may_die(what):
            all_gather(gathered, root, group=self._group)
        return gathered[:length]


def pieces(words: Tensor) -> Tensor:
    """int64 [..., PIECES] of int64 [...], each piece of PIECE_BITS."""
    return torch.stack([words >> PIECE_BITS * i & _MASK for i in range(PIECES)], -1)


def encode(words: Tensor, numbers: Sequence[float]) -> Tensor:
    """float32 [PIECES * words + numbers], on the device of the words, which are int64 [words]."""
    rest = torch.tensor(numbers, dtype=torch.float32, device=words.device)
    return torch.cat([pieces(words).view(-1).float(), rest])


def decode(sums: list[float], num_words: int) -> tuple[list[int], list[float]]:
    """The words, without signs, and the numbers. sums: of what each rank has encoded."""
    end = PIECES * num_words
    low, middle, high = (map(int, sums[i:end:PIECES]) for i in range(PIECES))
    # The last piece has two bits more than are left, copies of the sign.
    whole = (a | b << PIECE_BITS | c << 2 * PIECE_BITS for a, b, c in zip(low, middle, high, strict=True))
    return [word & (1 << 64) - 1 for word in whole], sums[end:]
