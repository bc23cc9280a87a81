"""An evaluation is one fixed tree of additions over blocks of a data set, at every world size.

The data set is cut, in its own order, into blocks of one size, with a smaller last one. Each block
is a leaf of the tree (reduce/tree.py), computed by itself, under its own random stream and from the
same buffers. Ranks take contiguous spans of blocks; where there are more ranks than blocks, some
have none. So each sample counts once, and the sums have the same bits everywhere.

It leaves no trace in the training: no gradients, and random generators, buffers and the modes of
modules are as before, also for the next block.
One block of each rank is loaded a second time by its neighbour: a dataset that draws from a
generator of its own, or counts its calls, is found there. With several ranks the neighbour also
computes it, so that weights which only one rank has loaded are found. It does not see what the
function keeps outside its result, and does not put modules into evaluation mode.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastic.data import random_streams
from elastic.data.fingerprint import fingerprint
from elastic.data.loader import Batch, BatchLoader, Slice
from elastic.errors import RecipeNotExact, UsageError
from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import Block, Stack, span
from elastic.system.phase import Phase
from elastic.train.evaluate.summands import (
    DTYPES,
    SummandForm,
    places_of_integers,
    put_together,
    sizes_of,
    take_apart,
)
from elastic.train.evaluate.whole_numbers import Extremes
from elastic.train.groups import ProcessGroups
from elastic.train.state import structure
from elastic.train.step.follow import Modes, drop_cached_weights
from elastic.worker.heartbeat import HeartbeatSender


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Of one data set.

    loader: of the data set, under a seed of the evaluation's own. samples: of the data set.
    batch_size: samples of a block. modules: their buffers are put back after each block. contents:
    a hash of what the data set holds, empty where it is not compared. checksum: of what a
    comparison of states covers, which is called where results differ.
    """

    loader: BatchLoader
    samples: int
    batch_size: int
    modules: list[nn.Module]
    groups: ProcessGroups
    heartbeat: HeartbeatSender
    contents: str = ""
    checksum: Callable[[], str] = str

    def sum(self, function: Callable[[Batch], Any]) -> Any:
        """The sum over all blocks of function(batch), the same on every rank.

        Raises UsageError for values that cannot be added, and inside the function of a step's sum;
        PeerLost when another rank is gone.
        """
        if self.heartbeat.phase is Phase.STEP:
            raise UsageError(
                "run.evaluate: expected a call outside of the function that step.mean_loss or step.sum is given, found one inside it, "
                "where each rank computes its own shards; call it in the body of the loop, where all ranks call it together"
            )
        num_blocks, world_size = -(-self.samples // self.batch_size), self.groups.world_size
        exchange = Exchange(
            shards=max(num_blocks, world_size),
            world_size=world_size,
            rank=self.groups.rank,
            group=self.groups.gradients,
        )
        form: SummandForm | None = None
        twice = _Twice()
        stacks, extremes = {dtype: Stack[Tensor](Tensor.add_) for dtype in DTYPES}, Extremes()
        with random_streams.kept(), torch.no_grad():
            own = (block for block in exchange.own_shards if block < num_blocks)
            buffers = _KeptBuffers(self.modules)
            for block, value in self._values(own, function, twice, buffers):
                found, vectors = take_apart(value, self.groups.device)
                if form is not None and found != form:
                    raise _differ(form, found)
                form = found
                if torch.int64 in vectors:
                    extremes.add(vectors[torch.int64])
                for dtype, vector in vectors.items():
                    stacks[dtype].push(Block(block, 1), vector)
            neighbour = span(exchange.shards, world_size, (self.groups.rank + 1) % world_size).start
            if neighbour < num_blocks:
                self._compute_again(neighbour, function, twice, buffers)
        form = self._agreed(form, twice)
        extremes.check(num_blocks, "run.evaluate", places_of_integers(form))
        totals = {}
        for dtype, sizes in sizes_of(form).items():
            for leaf in exchange.own_shards:
                if leaf >= num_blocks:  # a rank without a block adds nothing; 0.0 would turn -0.0 into 0.0
                    nothing = torch.full((sum(sizes),), -0.0, dtype=dtype, device=self.groups.device)
                    stacks[dtype].push(Block(leaf, 1), nothing)
            total = self._total(exchange, stacks[dtype].parts) if any(sizes) else torch.empty(0, dtype=dtype)
            totals[dtype] = torch.split(total, sizes)
        return put_together(form, totals)

    def _values(
        self,
        own: Iterable[int],
        function: Callable[[Batch], Any],
        twice: "_Twice",
        buffers: "_KeptBuffers",
    ) -> Iterator[tuple[int, Any]]:
        """(block, what the function returns for it) of each own block."""
        for batch in self.loader.batches(self._slice(block) for block in own):
            self.heartbeat.beat()
            is_first = not twice.first
            if is_first:
                twice.first = [fingerprint(batch.data)]
            value = self._call(function, batch, buffers)
            if is_first and self.groups.world_size > 1:
                twice.first.append(fingerprint(value))
            yield batch.shard, value

    def _compute_again(
        self, block: int, function: Callable[[Batch], Any], twice: "_Twice", buffers: "_KeptBuffers"
    ) -> None:
        """The first block of the next rank; of this one, where it is alone."""
        batch = self.loader.again(self._slice(block))
        twice.again = [fingerprint(batch.data)]
        if self.groups.world_size > 1:
            twice.again.append(fingerprint(self._call(function, batch, buffers)))

    def _call(self, function: Callable[[Batch], Any], batch: Batch, buffers: "_KeptBuffers") -> Any:
        random_streams.enter(self.loader.seed, "block", batch.shard)
        drop_cached_weights()
        value = function(batch)
        drop_cached_weights()
        buffers.put_back()
        return value

    def _slice(self, block: int) -> Slice:
        start = block * self.batch_size
        samples = torch.arange(start, min(self.samples, start + self.batch_size), dtype=torch.int64)
        return Slice(epoch=0, shard=block, indices=samples, streams=samples)

    def _agreed(self, form: SummandForm | None, twice: "_Twice") -> SummandForm:
        """The form of all ranks' values, also where this rank has no block.

        Raises UsageError where ranks differ in form, RecipeNotExact where a block's two
        computations do.
        """
        sizes = f"{self.samples} samples in blocks of {self.batch_size}"
        sizes += f" ({self.contents})" if self.contents else ""
        there: list[dict[str, Any]] = self.groups.all_gather(
            {"sizes": sizes, "form": form, "first": twice.first, "again": twice.again}
        )
        if len(found := {each["sizes"] for each in there}) > 1:
            raise UsageError(
                f"run.evaluate: expected the same call on every rank, found {' | '.join(sorted(found))}; give each rank the whole "
                "data set, whose blocks the ranks divide among themselves, split by a generator of its own"
            )
        forms: list[SummandForm] = [each["form"] for each in there if each["form"] is not None]
        for other in forms:
            if other != forms[0]:
                raise _differ(forms[0], other)
        for rank, each in enumerate(there):
            owner = (rank + 1) % len(there)
            first, again = there[owner]["first"], each["again"]
            if first[:1] != again[:1]:
                raise RecipeNotExact(
                    "run.evaluate: expected the same samples whenever a block is loaded, found other ones at a second time; the dataset or "
                    "its collate draws from a generator of its own, counts its calls, or reads the clock. Draw from the global generators "
                    "of torch, random or numpy, which are set for each sample"
                )
            # States that differ are found by their comparison, which knows a machine's error.
            if first != again and len(set(self.groups.all_gather(self.checksum()))) == 1:
                raise RecipeNotExact(
                    f"run.evaluate: expected one result for a block, found another on rank {rank} than on rank {owner}: the function reads what "
                    "differs between them, or what it has changed itself, so that the sum would mix the two. Do on every rank what changes it: load the best "
                    "weights and call eval() on all of them, not below `if run.is_first:`"
                )
        return forms[0]

    def _total(self, exchange: Exchange, parts: dict[Block, Tensor]) -> Tensor:
        with self.heartbeat.waiting():
            total = exchange.sum(parts, "an evaluation")
            if total.device.type == "cuda":  # nccl only queues the sum; the wait belongs here
                torch.cuda.current_stream(total.device).synchronize()
        return total


@dataclass(slots=True)
class _Twice:
    """Fingerprints of the samples and of the result: of this rank's first block, and of that of the
    next rank, computed here; empty where there is none.
    """

    first: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)


class _KeptBuffers:
    """The buffers of some modules as they are now, the values that they have now, and the modes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = structure.submodules(modules)
        self._modes = Modes.of(parts)
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


def _differ(one: SummandForm, other: SummandForm) -> UsageError:
    return UsageError(
        f"run.evaluate: expected sums of the same kinds and shapes for every block, found {one} and {other}; "
        "return sums over the block's samples, such as losses.sum(), and no value for each sample"
    )
