"""A dataset that remembers what it loaded is found before its first samples are trained.

A sample is a function of (seed, epoch, sample) alone, or else it depends on which samples a process
loaded before, and so on the number of workers. The samples of a run's first shard are therefore
loaded twice, in this process and under their own random streams: in their order, then the other way
round, and under other streams in between. A generator of the dataset's own, a counter, an iterator,
a running mean, or data that are changed in place make another batch the second time. Each rank
looks by itself, and none waits for another.

It does not find what this process would remember alike both times: a cache of augmented samples, or
labels that get numbers as they come.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from elastic.data.default_collate import default_collate
from elastic.data.fingerprint import fingerprint
from elastic.errors import UsageError

Collate = Callable[[list[Any]], Any]


def check(count: int, load: Callable[[Sequence[int], bool, Collate], Any], collate: Collate | None) -> None:
    """Raises UsageError where the two batches differ.

    count: of samples. load: gives a batch of them in this order, under their own random streams
    (True) or others, made by this function. collate: None for torch's default_collate.
    """

    def loaded(order: Sequence[int], *, is_own: bool = True) -> str:
        return fingerprint(load(order, is_own, _in_place(order, collate or default_collate)))

    first = loaded(range(count))
    loaded(range(count), is_own=False)
    # The last stays the last: what collate draws follows from its stream.
    if loaded([*range(count - 1)[::-1], count - 1]) != first:
        raise UsageError(
            "expected a dataset that gives the same samples at any time, found that the first ones, loaded again in another order under the same random streams, "
            "make another batch: it, or collate, counts its calls, reads an iterator, draws from a generator of its own, keeps a mean or a maximum, or writes into data that "
            "it reads. Draw from the global generators of torch, Python or NumPy in __getitem__, which are keyed for each sample; augment a copy (.clone() of a "
            "tensor, .copy() of an array); read each sample by its index; and compute means in the function of the step, by step.sum"
        )


def _in_place(order: Sequence[int], collate: Collate) -> Collate:
    """Makes the batch of samples that were loaded in this order as if they were in their own."""

    def collate_sorted(samples: list[Any]) -> Any:
        return collate([each for _, each in sorted(zip(order, samples, strict=True), key=itemgetter(0))])

    return collate_sorted
