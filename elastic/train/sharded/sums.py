"""The gradient of a sharded parameter is the tree sum over all shards, whichever rank holds a row.

FSDP2 reduces the gradients of one sharded module, flat, after each backward, over the shards that
the ranks compute at the same time. Here each rank receives its rows of each of these gradients
(all-to-all), and adds them up as leaves of the tree (reduce/tree.py), in float32 at least; the sum
is rounded once, to the dtype that the policy reduces in. In all backwards but the last, FSDP gets
zeros, which the step drops.

So that a rank holds about log2 of the shards in partial sums of its own rows, shards are dealt in
strides: the ranks compute neighbouring shards at the same time (`rounds`). All ranks take part in
each round, since a sharded forward gathers parameters from all of them. A rank that has no shard of
its own left computes one once more, first of all (a filler), whose gradients no rank adds.

An audit is one round more, in which each rank computes a shard of another one. Its rows are
compared by their checksums where they lie, and never sent.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.reduce.exchange import peers_may_die
from elastic.reduce.tree import Stack, fold
from elastic.snapshot.checksum import WORD_BYTES
from elastic.snapshot.image import device_bytes

Round = tuple[int, ...]  # the shard that each rank computes; a filler is one beyond the last


def rounds(spans: Sequence[range], *, is_reversed: bool = False) -> list[Round]:
    """What the ranks compute at the same time, one round after another."""
    most, shards = max(map(len, spans)), sum(map(len, spans))
    of_ranks = [[shards] * (most - len(own)) + list(own[::-1] if is_reversed else own) for own in spans]
    return list(zip(*of_ranks, strict=True))


def strides(shards: int, world_size: int) -> list[range]:
    """The shards of each rank."""
    return [range(rank, shards, world_size) for rank in range(world_size)]


@dataclass(slots=True)
class Computation:
    """Where the ranks are in a computation.

    shards: of a global batch. waiting: around each wait for other ranks. now: the round under way.
    is_added: whether its shards are, which an audit's are not; is_last: whether it ends the sums.
    audited: shards whose gradients get checksums: `checksums`, of this rank's rows, by shard and
    the name of a module. order: a checksum of the modules that were gathered and summed so far, in
    order. spoil: for drills, changes the next gradients of a module.
    """

    shards: int
    world_size: int
    waiting: Callable[[], AbstractContextManager[None]]
    now: Round = ()
    is_added: bool = True
    is_last: bool = False
    audited: frozenset[int] = frozenset()
    checksums: dict[int, dict[str, int]] = field(default_factory=dict)
    order: int = 0
    spoil: Callable[[Tensor], None] | None = None

    def note(self, module: int) -> None:
        self.order = crc32(module.to_bytes(4, "little"), self.order)


class Allocating:
    """What FSDP asks of whatever exchanges its tensors."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ModuleSums(Allocating):
    """The sums of one sharded module's gradients; FSDP calls it in place of its reduce-scatter."""

    def __init__(self, number: int, name: str, parameters: list[nn.Parameter], of: Computation) -> None:
        """number: of the module. parameters: those that are sharded with it and no inner one."""
        self.name, self._number = name, number
        self._output: Tensor | None = None
        self._parameters = parameters
        self._of = of
        self._stack: Stack[Tensor] = Stack(Tensor.add_)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *_: Any, **__: Any
    ) -> None:
        """input_tensor: the whole gradients, cut into one piece for each rank. output_tensor: takes
        the sum of this rank's piece over all shards.
        """
        self._check(input_tensor)
        self._of.note(self._number)
        received = torch.empty_like(input_tensor)
        with self._of.waiting(), peers_may_die("the sum of sharded gradients"):
            dist.all_to_all_single(received, input_tensor, group=group)
        self._add(received, output_tensor)

    def all_reduce_hook(self, output: Tensor) -> None:
        """The same with one worker, whose reduce-scatter FSDP leaves out."""
        self._check(output)
        self._add(output.clone(), output)
        self._output = output  # on a GPU another stream than that of its memory still reads it

    def _check(self, gradients: Tensor) -> None:
        if not self._of.now:
            raise UsageError(
                f"{self.name}: expected gradients by step.mean_loss or step.backward, found a backward of the recipe's own; make it a second "
                "step.mean_loss"
            )
        size = self._of.world_size
        wanted = [p for p in self._parameters if p.requires_grad]
        expected = sum(-(-p.shape[0] // size) * size * math.prod(p.shape[1:]) for p in wanted)
        if gradients.numel() != expected:
            raise UsageError(
                f"{self.name}: expected a gradient of each of its {len(wanted)} parameters in every shard, found none of some; "
                "freeze a parameter that no loss needs, or shard its layer by itself"
            )
        if self._of.spoil is not None:
            self._of.spoil(gradients)
            self._of.spoil = None

    def check(self, shards: int = 0) -> None:
        """Raises UsageError unless so many have been added since the last sum."""
        if sum(size for _, size in self._stack.parts) != shards:
            raise UsageError(
                f"{self.name}: expected gradients in every shard or in none, found them in some; give what a shard does not use a factor of 0, or "
                "shard it with a module that every shard uses"
            )

    def _add(self, received: Tensor, output: Tensor) -> None:
        of = self._of
        for shard, piece in zip(of.now, received.chunk(len(of.now)), strict=True):
            if shard in of.audited:
                of.checksums.setdefault(shard, {})[self.name] = words_of(piece)
            if of.is_added and shard < of.shards:
                self._stack.push((shard, 1), wide(piece))
        if of.is_last:
            self.check(of.shards)
            output.copy_(fold(self._stack.parts, of.shards, Tensor.add_))
            self._stack = Stack(Tensor.add_)
            return
        output.zero_()
        for block, part in self._stack.parts.items():
            if part.untyped_storage().nbytes() > part.nbytes:  # a view would keep the pieces of all ranks
                self._stack.parts[block] = part.clone()


def wide(numbers: Tensor) -> Tensor:
    return numbers.float() if numbers.itemsize < torch.float32.itemsize else numbers


def words_of(numbers: Tensor) -> int:
    """The sum of the 64-bit words of a contiguous tensor, on its device."""
    data = device_bytes(numbers)
    words = torch.nn.functional.pad(data, (0, -data.numel() % WORD_BYTES))  # a copy, so aligned
    return int(words.view(torch.int64).sum())
