"""Which samples a step trains is a pure function of (seed, epoch, step).

No world size, no history and no cursor enter it, so nothing of it needs saving. Each epoch is one
permutation of all samples, cut into global batches of B. What is left over does not fill a batch.
It is left out (`drop`: up to B - 1 samples of each epoch are not trained, other ones in each
epoch), or filled up from the start of the same permutation (`pad`: up to B - 1 samples are trained
twice; if there are fewer than B samples, each as often as it takes to fill a batch). Every other
sample is trained exactly once per epoch.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from elastic.data.random_keys import bits, key


class Tail(Enum):
    DROP = "drop"
    PAD = "pad"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    seed: int
    samples: int
    global_batch: int
    shards: int
    epochs: int
    tail: Tail

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.global_batch)
        return whole + (1 if rest and self.tail is Tail.PAD else 0)

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.epochs * self.steps_per_epoch

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, batch within it), both from 0, of a step counted from 1."""
        assert 1 <= step <= self.steps
        return divmod(step - 1, self.steps_per_epoch)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """int64 [samples]: the samples in the order of their keyed hashes, ties by index.

        A shuffle by a library's generator would change with the library's version; this one does
        not.
        """
        words = bits(key(self.seed, "order", epoch), np.arange(self.samples, dtype=np.uint64))
        return np.argsort(words, kind="stable").astype(np.int64)

    def batch(self, permutation: NDArray[np.int64], batch_in_epoch: int) -> NDArray[np.int64]:
        """int64 [global_batch]: the samples of one step, from its epoch's permutation."""
        positions = np.arange(batch_in_epoch * self.global_batch, (batch_in_epoch + 1) * self.global_batch)
        return permutation[positions % self.samples]

    def shard(self, batch: NDArray[np.int64], shard: int) -> NDArray[np.int64]:
        """int64 [global_batch / shards]: one shard's slice of a batch."""
        size = self.global_batch // self.shards
        return batch[shard * size : (shard + 1) * size]
