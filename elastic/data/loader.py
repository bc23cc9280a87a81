"""Shards of samples in step order, from any step on; a sample's augmentation draws from its own stream.

`dataset[i]` runs with torch's, Python's and NumPy's global generators keyed by (seed, epoch, i), in this process or in a data-loading process
alike, so that neither the number of loading processes nor the world size is seen in the data. A dataset that keeps generators of its own is
outside of this promise. Tensors in memory (TensorDataset) draw nothing and are indexed whole.
"""

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from elastic.data import random_streams
from elastic.data.order import Order
from elastic.data.random_keys import key, uniform


@dataclass(slots=True, kw_only=True)
class Batch:
    """One shard of one global batch."""

    data: Any  # collated samples, on the run's device
    indices: Tensor  # int64 [n], host memory: which samples
    epoch: int
    shard: int
    seed: int
    drawn: int = 0

    def __iter__(self) -> Iterator[Any]:
        """x, y = batch unpacks the data."""
        return iter(self.data)

    def uniform(self, count: int) -> Tensor:
        """float32 [n, count] in [0, 1), in host memory: the next draws of each sample's own stream, keyed by (seed, epoch, sample)."""
        words = uniform(key(self.seed, "batch", self.epoch), self.indices.numpy(), self.drawn, count)
        self.drawn += count
        return torch.from_numpy(words)


class Keyed(Dataset[Any]):
    """A map-style dataset whose samples are drawn under their own streams; asked by (epoch, sample)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, sample = place
        random_streams.enter(self._seed, "sample", epoch, sample)
        return self._dataset[sample]


def _outlive_requests(_number: int) -> None:
    """A request to stop that a scheduler sends to every process is the trainer's business: the step under way still needs its data."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_loaders() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class Loader:
    """Loads the shards of one rank."""

    def __init__(
        self, dataset: Any, order: Order, *, workers: int, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._workers = workers
        self._collate = collate or default_collate

    def load(self, shards: range, first_step: int) -> Iterator[Batch]:
        """Batches in step order, within a step in shard order, from `first_step` to the last."""
        places = self._places(shards, first_step)
        if isinstance(self._dataset, TensorDataset):
            for epoch, shard, indices in places:
                data = tuple(tensor[indices] for tensor in self._dataset.tensors)
                yield self._batch(data, epoch, shard, indices)
            return
        keyed = Keyed(self._dataset, self._order.seed)
        if self._workers == 0:
            for epoch, shard, indices in places:
                data = self._collate([keyed[epoch, i] for i in indices.tolist()])
                yield self._batch(data, epoch, shard, indices)
            return
        asked = (
            [(epoch, i) for i in indices.tolist()] for epoch, _, indices in self._places(shards, first_step)
        )
        # Registered after multiprocessing's own, so it runs before that asks the processes, by SIGTERM, and waits for them.
        atexit.register(_end_loaders)
        loader = DataLoader(
            keyed,
            batch_sampler=asked,
            num_workers=self._workers,
            collate_fn=self._collate,
            worker_init_fn=_outlive_requests,
        )
        for (epoch, shard, indices), data in zip(places, loader, strict=True):
            yield self._batch(data, epoch, shard, indices)

    def _places(self, shards: range, first_step: int) -> Iterator[tuple[int, int, Tensor]]:
        permutation, of_epoch = None, -1
        for step in range(first_step, self._order.steps + 1):
            epoch, place = self._order.place(step)
            if permutation is None or epoch != of_epoch:
                permutation, of_epoch = self._order.permutation(epoch), epoch
            batch = self._order.batch(permutation, place)
            for shard in shards:
                yield epoch, shard, torch.from_numpy(self._order.shard(batch, shard))

    def _batch(self, data: Any, epoch: int, shard: int, indices: Tensor) -> Batch:
        return Batch(data=data, indices=indices, epoch=epoch, shard=shard, seed=self._order.seed)
