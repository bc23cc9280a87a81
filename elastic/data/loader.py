"""A shard's samples depend on seed, epoch and step, not on loading processes or world size.

`dataset[i]` runs with torch's, Python's and NumPy's global generators keyed by (seed, epoch, i), in
this process or in a data-loading process alike. Tensors in memory (TensorDataset) draw nothing and
are indexed whole. It does not reach generators that a dataset keeps for itself: their draws depend
on what was loaded before.
"""

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from elastic.data import random_streams
from elastic.data.order import SampleOrder
from elastic.data.random_keys import key, uniform


@dataclass(slots=True, kw_only=True)
class Batch:
    """One shard of one global batch."""

    data: Any  # collated samples, on the run's device
    indices: Tensor  # int64 [n], host memory: which samples
    epoch: int
    shard: int
    seed: int
    drawn: int = 0  # numbers that `uniform` has given per sample

    def __iter__(self) -> Iterator[Any]:
        """x, y = batch unpacks the data."""
        return iter(self.data)

    def uniform(self, count: int) -> Tensor:
        """float32 [n, count] in [0, 1), host memory: the next draws of each sample's stream.

        The stream is keyed by (seed, epoch, sample), so a sample has the same numbers in any batch.
        """
        words = uniform(key(self.seed, "batch", self.epoch), self.indices.numpy(), self.drawn, count)
        self.drawn += count
        return torch.from_numpy(words)


class KeyedDataset(Dataset[Any]):
    """A map-style dataset, indexed by (epoch, sample), with a random stream for each sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, index: tuple[int, int]) -> Any:
        epoch, sample = index
        random_streams.enter(self._seed, "sample", epoch, sample)
        return self._dataset[sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Loads the shards of one rank.

    workers: data-loading processes, 0 to load in this one. collate: list of samples → batch.
    """

    dataset: Any
    order: SampleOrder
    device: torch.device
    workers: int = 0
    collate: Callable[[list[Any]], Any] = default_collate

    def steps(self, shards: range, first_step: int) -> Iterator[list[Batch]]:
        """The batches of `shards`, in order, for each step from `first_step` to the last."""
        batches = self._batches(shards, first_step)
        while batch := list(islice(batches, len(shards))):
            yield batch

    def _batches(self, shards: range, first_step: int) -> Iterator[Batch]:
        slices, ahead = tee(self._slices(shards, first_step))
        for (epoch, shard, indices), data in zip(slices, self._load(ahead), strict=True):
            moved = to_device(data, self.device)
            yield Batch(data=moved, indices=indices, epoch=epoch, shard=shard, seed=self.order.seed)

    def _load(self, slices: Iterator[tuple[int, int, Tensor]]) -> Iterator[Any]:
        """The collated samples of each slice. Loading processes take slices ahead of their use."""
        if isinstance(self.dataset, TensorDataset):
            tensors = self.dataset.tensors
            return (tuple(tensor[indices] for tensor in tensors) for _, _, indices in slices)
        keyed = KeyedDataset(self.dataset, self.order.seed)
        requests = ([(epoch, i) for i in indices.tolist()] for epoch, _, indices in slices)
        if self.workers == 0:
            return (self.collate([keyed[each] for each in request]) for request in requests)
        # Registered after multiprocessing's own handler, so it runs before that one, which would
        # send SIGTERM to the data-loading processes, which ignore it, and wait for them forever.
        atexit.register(_kill_loading_processes)
        return iter(
            DataLoader(
                keyed,
                batch_sampler=requests,
                num_workers=self.workers,
                collate_fn=self.collate,
                worker_init_fn=_ignore_stop_signals,
            )
        )

    def _slices(self, shards: range, first_step: int) -> Iterator[tuple[int, int, Tensor]]:
        """(epoch, shard, int64 [n] samples) of each batch."""
        permutation = lru_cache(maxsize=1)(self.order.permutation)
        for step in range(first_step, self.order.steps + 1):
            epoch, batch_in_epoch = self.order.position(step)
            batch = self.order.batch(permutation(epoch), batch_in_epoch)
            for shard in shards:
                yield epoch, shard, torch.from_numpy(self.order.shard(batch, shard))


def to_device(value: Any, device: torch.device) -> Any:
    """The value, with all tensors in its tuples, lists and dicts moved to `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return value


def _ignore_stop_signals(_number: int) -> None:
    """In a data-loading process: a scheduler may signal every process of a job to ask for a stop.

    The trainer handles that request, and the step under way still needs its data.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _kill_loading_processes() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
