"""A shard's samples depend on seed, epoch and step, not on loading processes or world size.

`dataset[i]` runs with torch's, Python's and NumPy's global generators keyed by (seed, epoch, i), in
this process or in a data-loading process alike; where weights or an own order draw a sample several
times in an epoch, each draw has a key of its own. Tensors in memory (a TensorDataset itself, no
subclass, and without an own collate) draw nothing and are indexed whole. It does not reach what a
dataset keeps for itself, such as a generator, a cache of augmented samples or labels that get
numbers as they come: an audit or a rehearsal, which load again, see those.

Data-loading processes load batches ahead of their use, each as this process would, and an error is
raised where its batch is used. A signal that asks for a stop is not for them: the step under way
still needs its data.
"""

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise, tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from elastic.data import random_streams
from elastic.data.order import SampleOrder
from elastic.data.random_keys import key, uniform
from elastic.errors import UsageError
from elastic.system import forked_child, stop_signals

SLICES_AHEAD = 2  # of each process at least, as torch has it by default
Request = list[tuple[int, int, int]]  # epoch, stream and number of each sample of a batch


@dataclass(slots=True, kw_only=True)
class Batch:
    """One shard of one global batch; or one block of a data set that is evaluated."""

    data: Any  # collated samples, on the run's device
    indices: Tensor  # int64 [n], host memory: which samples
    streams: Tensor  # int64 [n], host memory: the number of each one's random stream
    epoch: int
    shard: int
    seed: int
    drawn: int = 0  # numbers that `uniform` has given per sample

    def __iter__(self) -> Iterator[Any]:
        """x, y = batch unpacks the data."""
        return iter(self.data)

    def uniform(self, count: int) -> Tensor:
        """float32 [n, count] in [0, 1), host memory: the next draws of each sample's stream.

        The stream is keyed by (seed, epoch, sample), so a sample has the same numbers in any batch;
        and by how often the epoch drew it before, with weights or an own order.
        """
        words = uniform(key(self.seed, "batch", self.epoch), self.streams.numpy(), self.drawn, count)
        self.drawn += count
        return torch.from_numpy(words)


# Which samples one batch has: epoch, shard, indices and streams, as in Batch.
Slice = tuple[int, int, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoader:
    """Loads batches of given samples.

    workers: data-loading processes, 0 to load in this one. collate: list of samples → batch; None
    for torch's default_collate. ahead: batches that are used together, as those of a step are.
    """

    dataset: Any
    seed: int
    device: torch.device
    workers: int
    collate: Callable[[list[Any]], Any] | None
    ahead: int = 1

    def batches(self, slices: Iterator[Slice]) -> Iterator[Batch]:
        """One batch of each slice, in order. Loading processes take slices ahead of their use."""
        slices, ahead = tee(slices)
        for (epoch, shard, indices, streams), data in zip(slices, self._load(ahead), strict=True):
            yield Batch(data=data, indices=indices, streams=streams, epoch=epoch, shard=shard, seed=self.seed)

    def again(self, one: Slice) -> Batch:
        """The batch of one slice, loaded in this process."""
        return next(replace(self, workers=0).batches(iter([one])))

    def _load(self, slices: Iterator[Slice]) -> Iterator[Any]:
        """The collated samples of each slice, on the run's device."""
        if type(self.dataset) is TensorDataset and self.collate is None:  # nothing is drawn or called
            tensors, device = self.dataset.tensors, self.device
            moves = any(tensor.device != device for tensor in tensors)
            # It is faster, takes no indices of another device, and gives row-major samples.
            takes = [
                partial(t.index_select, 0) if t.device.type == "cpu" and t.is_contiguous() else t.__getitem__
                for t in tensors
            ]
            for _, _, indices, _ in slices:
                data = [take(indices) for take in takes]
                yield tuple(to_device(data, device) if moves else data)
            return
        requests = (
            [(epoch, *pair) for pair in zip(streams.tolist(), indices.tolist(), strict=True)]
            for epoch, _, indices, streams in slices
        )
        keyed = KeyedBatches(dataset=self.dataset, seed=self.seed, collate=self.collate or default_collate)
        loaded: Iterator[Any] = (keyed[request] for request in requests)
        if self.workers:
            loaded = load_in_processes(keyed, requests, self.workers, ahead=self.ahead)
        for data in loaded:
            yield to_device(data, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Loads the shards of one rank; workers and collate as in BatchLoader."""

    dataset: Any
    order: SampleOrder
    device: torch.device
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None

    def reads_ahead(self, shards: int) -> int:
        """For how many steps at most, beyond the next one, the shards are fixed already.

        shards: of the first step. A later step may have one alone.
        """
        return slices_ahead(self.workers, shards) if self.workers else 0

    def steps_of(self, shards_of: Callable[[int], range], first_step: int) -> Iterator[list[Batch]]:
        """The batches of the shards of each step, in order, from `first_step` to the last.

        shards_of: called with a step; a step has the same shards each time.
        """
        loader = BatchLoader(
            dataset=self.dataset,
            seed=self.order.seed,
            device=self.device,
            workers=self.workers,
            collate=self.collate,
            ahead=len(shards_of(first_step)),  # while a step computes, the whole next one is loaded
        )
        batches = loader.batches(self._slices(shards_of, first_step))
        for number in range(first_step, self.order.steps + 1):
            yield list(islice(batches, len(shards_of(number))))

    def shard(self, step: int, shard: int) -> Batch:
        """One shard's batch of one step, loaded by itself in this process."""
        (batch,) = next(replace(self, workers=0).steps_of(lambda _step: range(shard, shard + 1), step))
        return batch

    def _slices(self, shards_of: Callable[[int], range], first_step: int) -> Iterator[Slice]:
        order = self.order
        for step in range(first_step, order.steps + 1):
            epoch, batch_in_epoch = order.position(step)
            drawn, numbers = order.drawn(epoch)
            samples = order.batch(drawn, batch_in_epoch)
            streams = samples if numbers is drawn else order.batch(numbers, batch_in_epoch)
            size = order.global_batch // order.shards
            for shard in shards_of(step):
                where = slice(shard * size, (shard + 1) * size)
                indices = torch.from_numpy(samples[where])
                own_streams = indices if streams is samples else torch.from_numpy(streams[where])
                yield epoch, shard, indices, own_streams


@dataclass(frozen=True, kw_only=True)  # without slots, whose error says nothing of a new name
class Data:
    """A dataset in the run's order; made by `Run.data`. It has no attributes to set."""

    loader: Loader

    @property
    def steps_per_epoch(self) -> int:
        """Raises UsageError where epochs differ in it, as they may with `order`."""
        order = self.loader.order
        ends = (0, *(order.ends or (order.steps_per_epoch,)))
        found = {end - before for before, end in pairwise(ends)}
        if len(found) > 1:
            raise UsageError(
                f"expected epochs of equally many steps, found {min(found)} to {max(found)}; use step.ends_epoch instead"
            )
        return found.pop()

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.loader.order.steps


def check_dataset(dataset: Any, where: str) -> int:
    """The number of samples of a map-style dataset.

    where: the call that was given it. Raises UsageError for what has no samples by number.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"{where}: expected a dataset, found a DataLoader; pass its dataset (loader.dataset), with workers=... and "
            "collate=... where it has them: the run itself makes batches and shuffles"
        )
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset | dict):
        with suppress(TypeError, NotImplementedError):
            return len(dataset)
    raise UsageError(
        f"{where}: expected a map-style dataset, with __len__ and __getitem__(number), found {type(dataset).__name__}; give the samples of a stream "
        "numbers, such as an index of files and offsets, or load it into a list"
    )


def to_device(value: Any, device: torch.device) -> Any:
    """The value, with all tensors in its tuples, lists and dicts moved to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedBatches(Dataset[Any]):
    """The collated samples of a request, each loaded under its own random stream."""

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, request: Request) -> Any:
        return self.collate([self._sample(*each) for each in request])

    def _sample(self, epoch: int, stream: int, sample: int) -> Any:
        random_streams.enter(self.seed, "sample", epoch, stream)
        return self.dataset[sample]


def slices_ahead(count: int, ahead: int) -> int:
    """How many batches `count` processes load before they are asked for: `ahead` of them, or a few
    more, so that each process loads equally many.
    """
    return count * max(SLICES_AHEAD, -(-ahead // count))


def load_in_processes(
    batches: KeyedBatches, requests: Iterator[Request], count: int, *, ahead: int
) -> Iterator[Any]:
    """The batches of these requests, in order.

    count: of processes. They have begun when it returns, with the dataset as it is, and load until
    the last batch. ahead: as for `slices_ahead`.
    """
    # Registered after multiprocessing's own handler, so it runs before that one, which would
    # send SIGTERM to the data-loading processes, which ignore it, and wait for them forever.
    atexit.unregister(_kill_loading_processes)
    atexit.register(_kill_loading_processes)
    loading = DataLoader(
        batches,
        batch_size=None,  # a request is a whole batch
        sampler=requests,
        num_workers=count,
        prefetch_factor=slices_ahead(count, ahead) // count,
        collate_fn=_as_it_is,
        worker_init_fn=_ignore_stop_signals,
    )
    with stop_signals.blocked():
        return iter(loading)


def _as_it_is(data: Any) -> Any:
    return data


def _ignore_stop_signals(_number: int) -> None:
    """In a data-loading process, whose data the step needs."""
    stop_signals.ignore()


def _kill_loading_processes() -> None:
    with suppress(ValueError):  # not the main thread
        # Torch's handler would raise an error here because a loading process was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon and not forked_child.is_one():  # a child has its parent's list
            process.kill()
