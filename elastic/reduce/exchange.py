"""Every rank gets the root of the tree sum, bit for bit the same at every world size.

There are three ways, and each performs exactly the additions of the tree (tree.py):

- A world of two, each rank with one block of equal size: one plain all-reduce. A sum of two numbers
  is the same in either order, whatever algorithm the library takes.
- A power-of-two world in which each rank holds one block of equal size: recursive halving and
  doubling (Rabenseifner 2004; Thakur et al. 2005). Neighbours swap halves first, so the levels of
  the exchange are the levels of the tree.
- Any other world: each rank receives its chunk of every block (all-to-all), folds the tree for that
  chunk, and all gather the finished chunks.

Spans may be others in each step (`divide`); every rank has a shard at least.

The library's own all-reduce is not used for more than two ranks: the order in which it adds depends
on the world size, the algorithm and the vector's length. With one block a rank each way moves
2·(W-1)/W of the vector per rank, as a ring all-reduce does; B blocks a rank move (B+1)·(W-1)/W.

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
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@contextmanager
def peers_may_die(what: str) -> Iterator[None]:
    """Turns a collective's RuntimeError, which is how torch reports a dead peer, into PeerLost."""
    try:
        yield
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
        sizes = {block.size for of_rank in self._blocks for block in of_rank}
        one_each = all(len(of_rank) == 1 for of_rank in self._blocks)
        self._halves = one_each and len(sizes) == 1 and self.world_size & (self.world_size - 1) == 0

    def sum_shards(self, of_shard: dict[int, Tensor], what: str) -> Tensor:
        """The tree sum of one tensor per own shard, in their order: on every rank, of their shape.

        All tensors have one shape, dtype and device; they are overwritten. `what` names the sum in
        an error. Raises PeerLost when another rank is gone.
        """
        form = next(iter(of_shard.values()))
        stack: Stack[Tensor] = Stack(Tensor.add_)
        for shard, value in of_shard.items():
            stack.push(Block(shard, 1), value.reshape(-1))
        total = self.sum(stack.parts, what)
        if self.world_size > 1 and total.device.type == "cuda":
            # nccl only queues the sum. Without this wait the host would stop for other ranks later,
            # in the middle of the recipe's code, where the agent takes a long stop for a hang.
            torch.cuda.current_stream(total.device).synchronize()
        return total.view(form.shape)

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
        with peers_may_die(what):
            if not self._halves:
                total = self._by_chunks(parts)
            else:
                (total,) = parts.values()
                if self.world_size == 2:
                    dist.all_reduce(total, group=self._group)
                else:
                    total = self._by_halves(total)
        return total.to(device)

    def _by_halves(self, vector: Tensor) -> Tensor:
        """Recursive halving, then doubling, of a vector that is padded to W equal chunks.

        At distance d a rank swaps with the rank whose number differs in bit d: it sends the half
        that the partner keeps and adds the half that it keeps itself. After log2(W) rounds each
        rank holds one finished chunk. The same path backwards gathers the chunks. For its half each
        partner adds the same two subtrees, one as left + right and the other as right + left, which
        gives the same bits.
        """
        length = vector.numel()
        padded = torch.nn.functional.pad(vector, (0, -length % self.world_size))
        low, high = 0, padded.numel()
        path: list[tuple[int, slice, slice]] = []
        distance = 1
        while distance < self.world_size:
            middle = (low + high) // 2
            lower, upper = slice(low, middle), slice(middle, high)
            mine, theirs = (upper, lower) if self.rank & distance else (lower, upper)
            received = torch.empty_like(padded[mine])
            self._swap(self.rank ^ distance, send=padded[theirs], receive=received)
            padded[mine].add_(received)
            path.append((self.rank ^ distance, mine, theirs))
            low, high = mine.start, mine.stop
            distance *= 2
        for partner, mine, theirs in reversed(path):
            self._swap(partner, send=padded[mine], receive=padded[theirs])
        return padded[:length]

    def _swap(self, partner: int, *, send: Tensor, receive: Tensor) -> None:
        peer = dist.get_global_rank(self._group, partner) if self._group is not None else partner
        operations = [
            dist.P2POp(dist.isend, send, peer, self._group),
            dist.P2POp(dist.irecv, receive, peer, self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _by_chunks(self, parts: dict[Block, Tensor]) -> Tensor:
        """Each rank receives its chunk of all blocks and folds it; then all gather the chunks.

        The vector is cut into W chunks of equal length, the last one padded with zeros. Padding
        costs no bits: zeros are added to zeros and cut off at the end.
        """
        mine = self._blocks[self.rank]
        length = parts[mine[0]].numel()
        chunk = -(-length // self.world_size)
        padding = chunk * self.world_size - length
        padded = [torch.nn.functional.pad(parts[block], (0, padding)) for block in mine]
        send = (
            torch.stack(padded).view(len(mine), self.world_size, chunk).transpose(0, 1).contiguous().view(-1)
        )
        counts = [len(of_rank) for of_rank in self._blocks]
        receive = send.new_empty(sum(counts) * chunk)
        dist.all_to_all_single(
            receive,
            send,
            [count * chunk for count in counts],
            [len(mine) * chunk] * self.world_size,
            group=self._group,
        )
        every = [block for of_rank in self._blocks for block in of_rank]
        root = fold(dict(zip(every, torch.split(receive, chunk), strict=True)), self.shards, Tensor.add_)
        gathered = send.new_empty(chunk * self.world_size)
        _all_gather(gathered, root, group=self._group)
        return gathered[:length]
