"""A dataset that remembers what it loaded is found before its first samples are trained.

A sample is a function of (seed, epoch, sample) alone, or else it depends on which samples a process
loaded before, and so on the number of workers. The first samples of a run are therefore loaded four
times, in this process: under their own random streams, under others, under their own again, and
under the others again after what the dataset keeps in memory was put back as it was at first. A
dataset that changes its data in place, or draws from a generator of its own, gives other samples
the third time; one that keeps samples with their augmentation gives others the fourth time. A cache
of what does not depend on random numbers passes.

The greatest length so far, or numbers that labels get when they come first, do not change when the
same samples come again. So the first few batches are loaded in two orders, each from what was kept
in memory at first: as they come, and by the length of their samples. How many these are depends on
the time that is left for it, so that slow samples do not delay the run by minutes; the first batch
alone is always loaded again. Each rank looks by itself, and none waits for another.

It does not find what the first samples do not show, nor memories in files, in other processes, in
objects that are no datasets, and samples of types that `fingerprint` does not know.
"""

from collections.abc import Callable, Iterable, Iterator
from io import IOBase
from itertools import takewhile
from typing import Any

import numpy as np
from torch import Tensor

from elastic.data.default_collate import default_collate
from elastic.data.fingerprint import fingerprint
from elastic.data.loading_memory import LoadingMemory
from elastic.errors import UsageError

Collate = Callable[[list[Any]], Any]

_OF_COLLATE = (
    "each process would keep its own, of the batches that it loaded: compute it in the function of the step, add it up by step.sum and keep it in "
    "elastic.Values, or use a constant"
)
_OF_ORDER = (
    "each process keeps its own, of the samples that it loaded so far: pad to a fixed length, or to the longest sample of the batch at hand; give "
    "labels and words their numbers before the loop, from the whole data set in a sorted order"
)


def check(
    dataset: Any,
    batches: list[list[int]],
    load: Callable[[int, bool, Collate], Any],
    collate: Any = None,
    has_time: Callable[[], bool] = lambda: True,
) -> None:
    """Raises UsageError, with the attribute that remembers where it is found.

    batches: the samples of the first few. load: gives one of them, by its place, under its own
    random streams (True) or others, made by this function. collate: makes a batch of samples; None
    for torch's default_collate. has_time: whether one batch more may be loaded in two orders.
    """
    memory = LoadingMemory(dataset, [each for samples in batches for each in samples], collate)
    made: Collate = collate or default_collate
    _check_again(memory, lambda is_own: load(0, is_own, made), _iterator_of(dataset), collate is not None)
    if len(batches) > 1:
        _check_order(memory, len(batches), lambda place, by: load(place, True, by), made, has_time)


def _iterator_of(dataset: Any) -> str:
    """An attribute that may give the samples one after the other; a file has places of its own."""
    held = getattr(dataset, "__dict__", {}).items()
    return next((name for name, it in held if isinstance(it, Iterator) and not isinstance(it, IOBase)), "")


def _check_again(
    memory: LoadingMemory, load: Callable[[bool], Any], iterator: str, has_collate: bool
) -> None:
    first, other, again = (fingerprint(load(own)) for own in (True, False, True))
    changed = memory.changed()
    memory.put_back()
    if first == again and other == fingerprint(load(False)):
        return
    memory.put_back()
    if not changed or first != fingerprint(load(True)):
        found = (
            "the same samples, loaded again under the same random streams, are other ones: it reads an iterator, draws from a "
            "generator of its own, or writes into data that it reads"
        )
        if has_collate:
            found += ", or collate keeps something from call to call"
        advice = (
            "draw from the global generators of torch, Python or NumPy in __getitem__, which are keyed for each sample, "
            "and augment a copy (.clone() of a tensor, .copy() of an array)"
        )
        if iterator:
            found = f"it reads the iterator self.{iterator}, so that a sample depends on what was read before"
            advice = "read each sample by its index, as from a list or a file of offsets"
    elif first == again:
        found = f"{changed[0]} keeps samples with the random numbers of their first augmentation, so that each process trains others"
        advice = "keep what was read there, and augment what is returned"
    else:
        found = f"{changed[0]} was changed while samples were loaded, and the same samples, loaded again, are other ones"
        advice = "leave it as it is, and augment a copy (.clone() of a tensor, .copy() of an array)"
        if memory.is_number(changed[0]):
            advice = "each process counts its own: take the number from the sample's, or let the loop set it from step.number before the step's first computation"
        if changed[0].startswith("collate"):
            advice = _OF_COLLATE
    raise _refusal(found, advice)


def _check_order(
    memory: LoadingMemory,
    most: int,
    load: Callable[[int, Collate], Any],
    collate: Collate,
    has_time: Callable[[], bool],
) -> None:
    """load: gives the batch in this place, of at most so many, made by this function."""
    sizes: list[int] = []

    def measured(place: int) -> Any:
        def collate_too(samples: list[Any]) -> Any:
            sizes.append(max(map(_size, samples), default=0))
            return collate(samples)

        return load(place, collate_too)

    memory.put_back()
    as_they_come = [fingerprint(measured(place)) for place in takewhile(lambda _: has_time(), range(most))]
    if (count := len(as_they_come)) < 2:
        return
    changed = memory.changed()
    # The longest not first in both orders, and the other way round where all are equally long.
    sign = -1 if sizes[0] < max(sizes) else 1
    order = sorted(range(count), key=lambda place: (sign * sizes[place], -place))
    memory.put_back()
    if any(fingerprint(load(place, collate)) != as_they_come[place] for place in order):
        orders = range(count), order
        name = _culprit(memory, changed, lambda place: fingerprint(load(place, collate)), orders)
        found = "the same samples, loaded in another order, make other batches"
        raise _refusal(
            f"{name} was changed while samples were loaded, and {found}" if name else found, _OF_ORDER
        )


def _culprit(
    memory: LoadingMemory, names: list[str], load: Callable[[int], str], orders: tuple[Iterable[int], ...]
) -> str:
    """The first of these names that alone makes batches depend on the order; empty for none."""
    for name in names:
        found: list[dict[int, str]] = []
        for order in orders:
            memory.put_back()
            found.append({})
            for place in order:
                memory.put_back(but=name)
                found[-1][place] = load(place)
        if found[0] != found[1]:
            return name
    return ""


def _size(sample: Any) -> int:
    """How many numbers, letters and items it has in all."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.size
    if isinstance(sample, dict):
        return sum(map(_size, sample.values()))
    if isinstance(sample, list | tuple):
        return len(sample) + sum(map(_size, sample))
    return len(sample) if isinstance(sample, str | bytes) else 1


def _refusal(found: str, advice: str) -> UsageError:
    return UsageError(
        f"expected a dataset that gives the same samples at any time, found that {found}; {advice}"
    )
