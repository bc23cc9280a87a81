"""An evaluation is one fixed tree of additions over blocks of a data set, at every world size.

The data set is cut, in its own order, into blocks of one size, with a smaller last one. Each block
is a leaf of the tree (reduce/tree.py), computed by itself, under its own random stream and from the
same buffers. Ranks take contiguous spans of blocks; where there are more ranks than blocks, some
have none. So each sample counts once, and the sums have the same bits everywhere.

It leaves no trace in the training: no gradients, and random generators, buffers and the modes of
modules are as before, also for the next block.
The first block of each rank is computed a second time by its neighbour, and the bits are compared:
a dataset that draws from a generator of its own or counts its calls, another data set on one rank,
and weights that only one rank has loaded are found there. A rank that is alone loads the samples a
second time. It does not see what the function keeps outside its result, and does not put modules
into evaluation mode.

What the function returns for a block is taken apart into vectors that can be added, and back. A
value is a number or a dense tensor, or a dict, list or tuple of values. Floats of any width are
added in float64, whole numbers and truth values exactly in int64, where they wrap as torch's own
sums do.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from elastic.data import random_streams
from elastic.data.fingerprint import fingerprint
from elastic.data.loader import Batch, BatchLoader, Slice
from elastic.errors import RecipeNotExact, UsageError
from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import Stack, span
from elastic.system.silence import Phase
from elastic.train.groups import ProcessGroups
from elastic.train.sharded.modules import ShardedModules
from elastic.train.state import structure
from elastic.train.step.contract import Modes
from elastic.worker.heartbeat import HeartbeatSender

DTYPES = torch.float64, torch.int64


class SummandForm(NamedTuple):
    """How a value is made of its numbers and tensors. parts: dtype and shape of each in 64 bits."""

    tree: TreeSpec
    parts: tuple[tuple[torch.dtype, torch.Size], ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in self.parts)
        return f"{self.tree} of ({parts})"

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """How many numbers each part of this dtype has, in order."""
        return [prod(shape) for each, shape in self.parts if each is dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The evaluations of one data set.

    loader: of the data set, under a seed of the evaluation's own. samples: of the data set.
    batch_size: samples of a block. modules: their buffers are put back after each block. checksum:
    of what a comparison of states covers, which is called where results differ.
    """

    loader: BatchLoader
    samples: int
    batch_size: int
    modules: list[nn.Module]
    groups: ProcessGroups
    heartbeat: HeartbeatSender
    sharded: ShardedModules | None = None
    checksum: Callable[[], str] = str

    def sum(self, function: Callable[[Batch], Any]) -> Any:
        """The sum over all blocks of function(batch), the same on every rank.

        Raises UsageError for values that cannot be added, and inside the function of a step's sum;
        RecipeNotExact where two computations of a block differ; PeerLost when another rank is gone.
        """
        if self.heartbeat.phase is Phase.STEP:
            raise UsageError(
                "run.evaluate: expected a call in the body of the loop, by all ranks together, found one inside the function that step.mean_loss "
                "or step.sum is given, where each rank computes its own shards"
            )
        rank, world_size = self.groups.rank, self.groups.world_size
        num_blocks = -(-self.samples // self.batch_size)
        exchange = Exchange(
            shards=max(num_blocks, world_size), world_size=world_size, rank=rank, group=self.groups.gradients
        )
        form: SummandForm | None = None
        first: list[Any] = []  # this rank's first block: its number, and hashes of its samples and result
        stacks = {dtype: Stack[Tensor](Tensor.add_) for dtype in DTYPES}
        with random_streams.kept(), torch.no_grad():
            kept = _KeptBuffers(self.modules)
            own = (self._slice(block) for block in exchange.own_shards if block < num_blocks)
            for batch in self.loader.batches(own):
                self.heartbeat.beat()
                samples = "" if first else fingerprint(batch.data)
                found, vectors = self._compute(function, batch, kept)
                if found != (form or found):
                    raise _differ("block", str(form), str(found))
                form, first = found, first or [batch.shard, samples, fingerprint(list(vectors.values()))]
                for dtype, vector in vectors.items():
                    stacks[dtype].push((batch.shard, 1), vector)
            neighbour = span(exchange.shards, world_size, (rank + 1) % world_size).start
            # The neighbour may have no block. Block 0 still tells this rank the form of the values.
            batch = self.loader.again(self._slice(neighbour if neighbour < num_blocks else 0))
            again = [batch.shard, fingerprint(batch.data), *first[2:]]
            if form is None or world_size > 1:
                found, vectors = self._compute(function, batch, kept)
                form, again[2:] = form or found, [fingerprint(list(vectors.values()))]
            if self.sharded is not None:
                # Each forward of a sharded module is one of all ranks: they make equally many.
                counts = [sum(block < num_blocks for block in each) for each in exchange.spans]
                for _ in range(max(counts) - counts[rank]):
                    self._compute(function, batch, kept)
        self._compare(str(form), first, again)
        totals = {}
        for dtype in DTYPES:
            if not (sizes := form.sizes(dtype)):
                continue
            for leaf in exchange.own_shards:
                if leaf >= num_blocks:  # a rank without a block adds nothing; 0.0 would turn -0.0 into 0.0
                    nothing = torch.full((sum(sizes),), -0.0, dtype=dtype, device=self.groups.device)
                    stacks[dtype].push((leaf, 1), nothing)
            with self.heartbeat.waiting():
                totals[dtype] = exchange.sum_and_wait(stacks[dtype].parts, "an evaluation")
        return put_together(form, totals)

    def _slice(self, block: int) -> Slice:
        start = block * self.batch_size
        samples = torch.arange(start, min(self.samples, start + self.batch_size), dtype=torch.int64)
        return 0, block, samples, samples

    def _compute(
        self, function: Callable[[Batch], Any], batch: Batch, kept: "_KeptBuffers"
    ) -> tuple[SummandForm, dict[torch.dtype, Tensor]]:
        random_streams.enter(self.loader.seed, "block", batch.shard)
        value = function(batch)
        kept.put_back()
        return take_apart(value, self.groups.device)

    def _compare(self, form: str, first: list[Any], again: list[Any]) -> None:
        """first, again: the number of a block, and hashes of its samples and of its result.

        Raises UsageError where ranks differ in form, RecipeNotExact where a block's two
        computations do.
        """
        sizes = f"{self.samples} samples in blocks of {self.batch_size}"
        mine: dict[str, Any] = {"rank": sizes, "block": form, "first": first, "again": again}
        if self.sharded is not None:
            mine["order"] = self.sharded.order()
        there = self.groups.all_gather(mine)
        if self.sharded is not None:
            self.sharded.check_order(
                [sum(each) for each in zip(*(each["order"] for each in there), strict=True)]
            )
        for name in ("rank", "block"):
            for each in there:
                if each[name] != there[0][name]:
                    raise _differ(name, there[0][name], each[name])
        firsts = ((rank, each["first"]) for rank, each in enumerate(there))
        owners = {first[0]: (rank, *first[1:]) for rank, first in firsts if first}
        for rank, each in enumerate(there):
            block, samples, result = each["again"]
            owner, own_samples, own_result = owners[block]
            if samples != own_samples:
                raise RecipeNotExact(
                    f"run.evaluate: expected the same samples whenever block {block} is loaded, found other ones; give each rank "
                    "the same dataset, and draw from the global generators alone, not from an own one or the clock"
                )
            # States that differ are found by their comparison, which knows a machine's error.
            if result != own_result and len(set(self.groups.all_gather(self.checksum()))) == 1:
                raise RecipeNotExact(
                    f"run.evaluate: expected one result for a block, found others on ranks {rank} and {owner}: the function reads what "
                    "differs between them; load weights and call eval() on every rank, not below `if run.is_first:`"
                )


class _KeptBuffers:
    """The buffers of some modules as they are now, the values that they have now, and the modes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = structure.submodules(modules)
        self._modes = Modes(parts)
        self._kept = [
            (part, name, buffer, buffer.detach().clone(), buffer._version)  # noqa: SLF001 - autograd's count
            for part in parts
            for name, buffer in part._buffers.items()  # noqa: SLF001 - where a forward may put another tensor
            if buffer is not None
        ]

    def put_back(self) -> None:
        self._modes.load()
        for part, name, buffer, value, version in self._kept:
            part._buffers[name] = buffer  # noqa: SLF001
            buffer.data.copy_(value)
            # An evaluation between a sum and its gradients has changed nothing.
            torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))  # noqa: SLF001


def _differ(of: str, one: str, other: str) -> UsageError:
    return UsageError(
        f"run.evaluate: expected the same for every {of}, found {one} and {other}; give each rank the whole dataset, and return "
        "sums over the block's samples, no value for each sample"
    )


def take_apart(value: Any, device: torch.device) -> tuple[SummandForm, dict[torch.dtype, Tensor]]:
    """The form of a value, and its numbers: one vector of new memory for each dtype that occurs.

    Raises UsageError for a value that cannot be added.
    """
    leaves, tree = tree_flatten(value)
    parts = [_widened(leaf) for leaf in leaves]
    vectors = {
        dtype: torch.cat([part.to(device).reshape(-1) for part in parts if part.dtype is dtype])
        for dtype in DTYPES
        if any(part.dtype is dtype for part in parts)
    }
    return SummandForm(tree, tuple((part.dtype, part.shape) for part in parts)), vectors


def put_together(form: SummandForm, totals: Mapping[torch.dtype, Tensor]) -> Any:
    """The value that these vectors make; a tensor without dimensions comes back as a number."""
    rest = {dtype: iter(torch.split(total, form.sizes(dtype))) for dtype, total in totals.items()}
    parts = [next(rest[dtype]).view(shape) for dtype, shape in form.parts]
    return tree_unflatten([part.clone() if part.dim() else part.item() for part in parts], form.tree)


def _widened(leaf: Any) -> Tensor:
    """float64 or int64. Raises UsageError for anything but a number or a dense tensor."""
    value = leaf
    if isinstance(leaf, float):
        value = torch.tensor(leaf, dtype=torch.float64)
    elif isinstance(leaf, int | np.generic | np.ndarray):
        with suppress(TypeError, OverflowError, RuntimeError, ValueError):  # it stays what it is
            value = torch.as_tensor(leaf)
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    if not is_dense or value.is_quantized or value.is_meta or value.is_complex():
        raise UsageError(
            "run.evaluate: expected the function to return a number, a dense tensor, or a dict or tuple of them, found a "
            f"{type(leaf).__name__} in it; return real sums over the samples of the batch"
        )
    wide: Tensor = value.detach().to(torch.float64 if value.is_floating_point() else torch.int64)
    return wide
