"""Which samples a step trains is a pure function of (seed, epoch, step).

No world size, no history and no cursor enter it, so nothing of it needs saving. Each epoch is one
permutation of all samples, or what the recipe chose instead (`Draws`), cut into global batches of
B. Samples left over do not fill a batch. They are left out (`drop`: up to B - 1 samples of each
epoch are not trained, other ones in each epoch), or filled up from the start of the same epoch
(`pad`: up to B - 1 samples are trained twice; if there are fewer than B samples, each as often as
it takes to fill a batch). Without weights or an own order every other sample of an epoch is trained
exactly once.

With weights the i-th draw of an epoch is a function of (seed, epoch, i): the inverse of the
cumulative sum at a keyed number. The sum is added up from the first weight on, in float64, so that
the draws are the same on every machine. A weight below 2**-53 of the sum before it counts as zero.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from elastic.data.random_keys import Permutation, bits, key, keyed_permutation

SORTED_UP_TO = 1 << 20  # samples; a sort of them takes 0.13 s and 24 MiB at each epoch and restart

Samples = NDArray[np.int64] | Permutation  # of an epoch, in their order


class Tail(Enum):
    DROP = "drop"
    PAD = "pad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The samples of each epoch where they are no permutation of all: by weights, or of the recipe.

    of_epoch: int64 [n], the samples of an epoch in their order, the same at each call. ends: the
    last step of each epoch; None where each epoch has as many draws as there are samples.
    sha256: of what was chosen, for comparisons.
    """

    of_epoch: Callable[[int], NDArray[np.int64]]
    sha256: str
    ends: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)  # without slots, so that it can keep its properties
class SampleOrder:
    """epochs: those that the run begins. most_steps: where it ends within the last of them."""

    seed: int
    samples: int
    global_batch: int
    shards: int
    epochs: int
    tail: Tail
    most_steps: int | None = None
    draws: Draws | None = None

    @property
    def ends(self) -> tuple[int, ...] | None:
        """The last step of each epoch; None where all epochs have equally many."""
        return None if self.draws is None else self.draws.ends

    @cached_property
    def steps_per_epoch(self) -> int:
        """Where all epochs have equally many."""
        return steps_in(self.samples, self.global_batch, self.tail)

    @cached_property
    def steps(self) -> int:
        """How many the whole run has."""
        ends = self.ends
        whole = self.epochs * self.steps_per_epoch if ends is None else ends[-1]
        return whole if self.most_steps is None else min(whole, self.most_steps)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, batch within it), both from 0, of a step counted from 1."""
        assert step >= 1
        if self.draws is None or (ends := self.draws.ends) is None:
            return divmod(step - 1, self.steps_per_epoch)
        epoch = bisect_right(ends, step - 1)
        return epoch, step - 1 - (ends[epoch - 1] if epoch else 0)

    def epoch_end(self, step: int) -> int:
        """The last step of the epoch that this step is in; of the run, in its last epoch."""
        ends = self.ends
        if ends is None:
            return min(self.steps, -(-step // self.steps_per_epoch) * self.steps_per_epoch)
        return min(self.steps, ends[min(bisect_right(ends, step - 1), len(ends) - 1)])

    def ends_epoch(self, step: int) -> bool:
        """Whether it is the last step of its epoch; the last step of the run ends one too."""
        return step == self.epoch_end(step)

    @cached_property
    def drawn(self) -> Callable[[int], tuple[Samples, Samples]]:
        """Of an epoch, its samples and their streams: a sort of all, perhaps, or the recipe's own
        function. The last two are kept, since the loader may be in the next epoch while an audit
        loads from this one.
        """

        @lru_cache(maxsize=2)
        def drawn(epoch: int) -> tuple[Samples, Samples]:
            samples = self.of_epoch(epoch)
            return samples, self.streams(samples)

        return drawn

    def of_epoch(self, epoch: int) -> Samples:
        """int64 [n]: the samples of an epoch, in their order."""
        return self.permutation(epoch) if self.draws is None else self.draws.of_epoch(epoch)

    def streams(self, of_epoch: Samples) -> Samples:
        """int64 [n]: the number of each draw's random stream.

        It is the sample's own number at its first draw of the epoch. A sample that is drawn again
        has a stream of its own each time: its number plus a multiple of `samples`.
        """
        if isinstance(of_epoch, Permutation) or self.draws is None:
            return of_epoch
        return of_epoch + self.samples * earlier_draws(of_epoch)

    def permutation(self, epoch: int) -> Samples:
        """int64 [samples]: all samples, each once.

        A shuffle by a library's generator would change with the library's version; these do not. A
        sort of keyed hashes gives each permutation equally often, also of a few samples, and
        computes all of it. A network gives any place of it by itself, in no memory.
        """
        if self.samples > SORTED_UP_TO:
            return keyed_permutation(key(self.seed, "permutation", epoch), self.samples)
        words = bits(key(self.seed, "order", epoch), np.arange(self.samples, dtype=np.uint64))
        return np.argsort(words, kind="stable").astype(np.int64)  # ties by index

    def batch(self, of_epoch: Samples, batch_in_epoch: int) -> NDArray[np.int64]:
        """int64 [global_batch]: what one step takes of its epoch's samples, or of their streams."""
        begin = batch_in_epoch * self.global_batch
        end = begin + self.global_batch
        if isinstance(of_epoch, np.ndarray) and end <= len(of_epoch):
            return of_epoch[begin:end].copy()
        return of_epoch[np.arange(begin, end) % len(of_epoch)]


def steps_in(samples: int, global_batch: int, tail: Tail) -> int:
    """Global batches of an epoch of so many samples."""
    whole, rest = divmod(samples, global_batch)
    return whole + (1 if rest and tail is Tail.PAD else 0)


def earlier_draws(of_epoch: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: how often each position's sample was drawn at positions before it."""
    by_sample = np.argsort(of_epoch, kind="stable")
    ordered = of_epoch[by_sample]
    counts = np.empty_like(of_epoch)
    counts[by_sample] = np.arange(len(of_epoch)) - np.searchsorted(ordered, ordered, side="left")
    return counts


def weighted_draws(seed: int, weights: NDArray[np.float64]) -> Draws:
    """As many draws in each epoch as there are samples, with replacement.

    weights: float64 [samples], finite, none negative, not all zero.
    """
    sums = np.cumsum(weights / weights.max())
    return Draws(of_epoch=partial(_weighted, seed, sums), sha256=short_sha256(sums.view(np.int64)))


def _weighted(seed: int, sums: NDArray[np.float64], epoch: int) -> NDArray[np.int64]:
    words = bits(key(seed, "weights", epoch), np.arange(len(sums), dtype=np.uint64))
    places = (words >> np.uint64(11)) * 2.0**-53 * sums[-1]  # as many bits as a float64 has
    below = np.nextafter(sums[-1], 0.0)  # which the product may round up beyond
    drawn: NDArray[np.int64] = np.searchsorted(sums, np.minimum(places, below), side="right")
    return drawn


def short_sha256(numbers: NDArray[np.int64]) -> str:
    """Equal for equal numbers, on any machine."""
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()[:16]
