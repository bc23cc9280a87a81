"""Datasets whose samples depend on what was loaded before are found at a run's first samples."""

import random
import sys
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import UsageError
from elastic.testing.fakes import FakeClock

ORDER = SampleOrder(seed=3, samples=16, global_batch=8, shards=2, epochs=1, tail=Tail.DROP)
ROWS = torch.arange(64.0).reshape(16, 4)


class Images(Dataset):
    """Exact: it augments a copy."""

    def __init__(self, images=None):
        self.images = ROWS.clone() if images is None else images
        self.cache = {}
        self.calls = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, sample):
        return self.read(sample) + torch.rand(4)

    def read(self, sample):
        return self.images[sample]


def loaded(dataset, **options):
    options.setdefault("clock", FakeClock())
    loader = Loader(dataset=dataset, order=ORDER, device=torch.device("cpu"), **options)
    return [batch.data for step in loader.steps(range(2), 1, check_first=True) for batch in step]


def refused(dataset, **options):
    with pytest.raises(UsageError) as error:
        loaded(dataset, **options)
    return str(error.value)


class CutsOut(Images):
    """Half of the time, in place."""

    def __getitem__(self, sample):
        if random.random() < 0.5:
            self.images[sample][random.randrange(4)] = -1
        return torch.as_tensor(self.images[sample]) + 0


SHARED = ROWS.clone()


class CutsOutOfAGlobal(CutsOut):
    """What it writes into is no attribute, so that its name is not found."""

    def __init__(self):
        super().__init__()
        SHARED.copy_(self.images)
        del self.images

    def __len__(self):
        return len(SHARED)

    def __getattr__(self, name):
        return SHARED if name == "images" else super().__getattribute__(name)


class KeepsAugmented(Images):
    def __getitem__(self, sample):
        if sample not in self.cache:
            self.cache[sample] = self.read(sample) + torch.rand(4)
        return self.cache[sample]


class KeepsInPlaces(KeepsAugmented):
    """A list with a place for each sample."""

    def __init__(self):
        super().__init__()
        self.kept = [None] * 16

    def __getitem__(self, sample):
        if self.kept[sample] is None:
            self.kept[sample] = self.augmented(sample)
        return self.kept[sample]

    def augmented(self, sample):
        return self.images[sample] + torch.rand(4)


class KeepsInRows(Images):
    """Rows of an array, and which of them are filled."""

    def __init__(self):
        super().__init__()
        self.rows, self.is_filled = np.zeros((16, 4), np.float32), np.zeros(16, bool)

    def __getitem__(self, sample):
        if not self.is_filled[sample]:
            self.rows[sample] = self.images[sample] + torch.rand(4)
            self.is_filled[sample] = True
        return self.rows[sample].copy()


class KeepsByDecorator(Images):
    @lru_cache  # noqa: B019 - as recipes do it
    def __getitem__(self, sample):
        return self.images[sample] + torch.rand(4)


class Counts(Images):
    def __getitem__(self, sample):
        self.calls += 1
        return self.images[sample] * self.calls


class DrawsItself(Images):
    """Beside a cache of what it read, which is not to blame."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, sample):
        self.cache[sample] = self.images[sample]
        return self.images[sample] + self.generator.random()


class Policy:
    count = 0


class CountsBelow(Images):
    """Two levels deep: in an object that its transform holds."""

    def __init__(self):
        super().__init__()
        self.transform = type("Transform", (), {"__module__": __name__})()
        self.transform.policy = Policy()

    def __getitem__(self, sample):
        self.transform.policy.count += 1
        return self.images[sample] + self.transform.policy.count


class CountsInClass(Images):
    calls = 0

    def __init__(self):
        super().__init__()
        del self.calls

    def __getitem__(self, sample):
        CountsInClass.calls += 1
        return self.images[sample] + CountsInClass.calls


class CountsBelowInAList(CountsBelow):
    def __init__(self):
        super().__init__()
        self.transform.transforms = [self.transform.policy]
        del self.transform.policy

    def __getitem__(self, sample):
        self.transform.transforms[0].count += 1
        return self.images[sample] + self.transform.transforms[0].count


class ReadsIterator(Images):
    def __init__(self):
        super().__init__()
        self.rows = iter(torch.arange(1000.0))

    def __getitem__(self, sample):
        return next(self.rows)


WRITTEN = "dataset.images was changed while samples were loaded"
MEMORIES = {
    "tensor": (CutsOut, WRITTEN),
    "array": (lambda: CutsOut(ROWS.numpy().copy()), WRITTEN),
    "list of tensors": (lambda: CutsOut(list(ROWS.clone())), WRITTEN),
    "subset": (lambda: Subset(CutsOut(), range(16)), "dataset.dataset.images was changed"),
    "parts": (
        lambda: ConcatDataset([Subset(CutsOut(), range(8))] * 2),
        "dataset.datasets[0].dataset.images was",
    ),
    "dict": (
        KeepsAugmented,
        "dataset.cache keeps samples with the random numbers of their first augmentation",
    ),
    "list": (KeepsInPlaces, "dataset.kept keeps samples with"),
    "rows": (KeepsInRows, "dataset.rows keeps samples with"),
    "decorator": (KeepsByDecorator, "KeepsByDecorator.__getitem__ keeps samples with"),
    "counter": (Counts, "dataset.calls was changed"),
    "counter of a transform": (CountsBelow, "dataset.transform.policy.count was changed"),
    "counter of one of several": (CountsBelowInAList, "dataset.transform.transforms[0].count was changed"),
    "counter of a class": (CountsInClass, "dataset.calls was changed while"),
    "generator": (
        DrawsItself,
        "it reads an iterator, draws from a generator of its own, or writes into data that it reads; draw",
    ),
    "iterator": (ReadsIterator, "it reads the iterator self.rows, so that a sample depends on what was read"),
    "global": (CutsOutOfAGlobal, "keyed for each sample, and augment a copy (.clone() of a tensor"),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_dataset_that_remembers_is_refused_with_what_remembers(memory, workers):
    """Data-loading processes have copies; the check runs in the process that began them."""
    dataset, says = MEMORIES[memory]
    assert says in refused(dataset(), workers=workers)


class KeepsRead(Images):
    """Caches of each kind, of what needs no random number; it counts what it read."""

    def __init__(self):
        super().__init__()
        self.last, self.kept, self.reads = deque(maxlen=3), [None] * 16, 0
        self.rows = torch.zeros(16, 4)

    def read(self, sample):
        if sample not in self.cache:
            self.reads += 1
            self.cache[sample] = self.images[sample].clone()
            self.kept[sample] = self.decoded(sample)
            self.rows[sample] = self.images[sample]
            self.last.append((sample, self.cache[sample]))
        return self.cache[sample] + self.kept[sample] + self.rows[sample]

    @lru_cache  # noqa: B019 - as recipes do it
    def decoded(self, sample):
        return self.images[sample] * 2


class Opens(Images):
    """Files, once: opening one of them twice would fail."""

    def __init__(self):
        super().__init__()
        self.files, self.file = {}, None

    def __getitem__(self, sample):
        if not self.files:
            assert self.file is None
            self.files["images"] = self.file = object()
        return super().__getitem__(sample)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [KeepsRead, Opens, lambda: Subset(KeepsRead(), list(range(16))[::-1])])
def test_a_cache_of_what_was_read_passes_and_changes_no_sample(dataset, workers):
    found = loaded(dataset(), workers=workers)
    unchecked = Loader(dataset=dataset(), order=ORDER, device=torch.device("cpu")).steps(range(2), 1)
    flat = [batch.data for step in unchecked for batch in step]
    assert all(torch.equal(one, other) for one, other in zip(flat, found, strict=True))


def test_a_collate_that_changes_samples_in_place_is_found():
    """They are views of the dataset's tensor."""

    class Views(Images):
        def __getitem__(self, sample):
            return self.images[sample]

    def noisy(samples):
        return default_collate([sample.add_(torch.rand(1)) for sample in samples])

    assert "dataset.images was changed" in refused(Views(), collate=noisy)


def test_samples_that_cannot_be_compared_pass():
    class Objects(Images):
        def __getitem__(self, sample):
            return object()

    assert len(loaded(Objects(), collate=list)) == 4


def test_a_subset_that_numbers_its_samples_otherwise_is_loaded_as_it_says():
    """Twice each of eight samples: its numbers go beyond its indices and the parts in it."""

    class Twice(Subset):
        def __len__(self):
            return 2 * len(self.indices)

        def __getitem__(self, sample):
            return self.dataset[self.indices[sample // 2]]

        def __getitems__(self, samples):
            return [self[sample] for sample in samples]

    assert len(loaded(Twice(ConcatDataset([Images(ROWS[:8])]), range(8)))) == 4


class Centred:
    mean = 0.0

    def __call__(self, samples):
        x = torch.stack(samples)
        self.mean = 0.9 * self.mean + 0.1 * float(x.mean())
        return x - self.mean


class CentredByATensor(Centred):
    def __init__(self):
        self.mean = torch.zeros(4)

    def __call__(self, samples):
        x = torch.stack(samples)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


def centred(samples):
    global MEAN  # noqa: PLW0603 - what a recipe does
    x = torch.stack(samples)
    MEAN = 0.9 * MEAN + 0.1 * float(x.mean())
    return x - MEAN


MEAN = 0.0


@pytest.mark.parametrize(
    ("collate", "name"),
    [(Centred(), "collate.mean"), (CentredByATensor(), "collate.mean"), (centred, "collate's MEAN")],
)
def test_a_running_mean_that_collate_keeps_is_named_with_its_place(collate, name):
    """Each process would have that of the batches which it loaded."""
    found = refused(Images(), collate=collate)
    assert f"found that {name} was changed while samples were loaded" in found
    assert "add it up by step.sum and keep it in elastic.Values" in found


def test_what_remembers_is_named_wherever_the_recipes_folder_lies(monkeypatch):
    """In a folder whose name only ends like that of installed packages."""
    module = ModuleType("data_of_a_recipe")
    module.__file__ = "/home/u/my-packages/data.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    dataset = CountsBelow()
    dataset.transform = type("Transform", (), {"__module__": module.__name__})()
    dataset.transform.policy = type("Policy", (), {"__module__": module.__name__, "count": 0})()
    assert "dataset.transform.policy.count" in refused(dataset)


LENGTHS = [9, 4, 6, 5, 7, 3, 8, 8, 2, 9, 4, 6, 5, 7, 3, 8]


class Texts(Dataset):
    """Of different lengths, with one label of three."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, sample):
        return torch.full((LENGTHS[sample],), float(sample)), "abc"[sample * 7 % 3]


def padded(samples, length):
    return torch.stack([pad(x, (0, length - len(x))) for x, _ in samples])


def pads(length):
    """A collate that pads to what this makes of the samples' lengths."""
    return lambda samples: padded(samples, length([len(x) for x, _ in samples]))


class PadsToTheLongest:
    longest = 0

    def __call__(self, samples):
        self.longest = max(self.longest, *(len(x) for x, _ in samples))
        return padded(samples, self.longest)

    def collate(self, samples):
        return self(samples)


@dataclass(slots=True)
class PadsToTheLongestInASlot:
    longest: int = 0
    __call__ = PadsToTheLongest.__call__


class CutsToTheShortest:
    def __init__(self):
        self.shortest = 99

    def __call__(self, samples):
        self.shortest = min(self.shortest, *(len(x) for x, _ in samples))
        return torch.stack([x[: self.shortest] for x, _ in samples])


class NumbersLabels:
    def __init__(self):
        self.numbers = {}

    def __call__(self, samples):
        return torch.tensor([self.numbers.setdefault(label, len(self.numbers)) for _, label in samples])


LONGEST, NUMBERS = 0, {}


def pads_by_a_variable(samples):
    global LONGEST  # noqa: PLW0603 - what a recipe does
    LONGEST = max(LONGEST, *(len(x) for x, _ in samples))
    return padded(samples, LONGEST)


def numbers_by_a_variable(samples):
    return torch.tensor([NUMBERS.setdefault(label, len(NUMBERS)) for _, label in samples])


def pads_by_a_closure():
    longest = 0

    def collate(samples):
        nonlocal longest
        longest = max(longest, *(len(x) for x, _ in samples))
        return padded(samples, longest)

    return collate


def numbers_by_a_default(samples, known={}):  # noqa: B006 - what a recipe does
    return torch.tensor([known.setdefault(label, len(known)) for _, label in samples])


class LongestInTheDataset(Texts):
    longest = 0

    def __getitem__(self, sample):
        x, _ = super().__getitem__(sample)
        self.longest = max(self.longest, len(x))
        return x / self.longest


class NumbersInTheDataset(Texts):
    def __init__(self):
        self.numbers, self.read = {}, {}

    def __getitem__(self, sample):
        x, label = self.read.setdefault(sample, super().__getitem__(sample))
        return self.numbers.setdefault(label, len(self.numbers)), x


ORDERS = {
    "longest": (Texts, PadsToTheLongest, "collate.longest"),
    "longest, of a method": (Texts, lambda: PadsToTheLongest().collate, "PadsToTheLongest.longest"),
    "longest, in a slot": (Texts, PadsToTheLongestInASlot, "collate.longest"),
    "longest, of a variable": (Texts, lambda: pads_by_a_variable, "collate's LONGEST"),
    "longest, of a closure": (Texts, pads_by_a_closure, "collate's longest"),
    "shortest": (Texts, CutsToTheShortest, "collate.shortest"),
    "labels": (Texts, NumbersLabels, "collate.numbers"),
    "labels, of a variable": (Texts, lambda: numbers_by_a_variable, "collate's NUMBERS"),
    "labels, of a default": (Texts, lambda: numbers_by_a_default, "collate's known"),
    "longest, of the dataset": (LongestInTheDataset, lambda: list, "dataset.longest"),
    "labels, of the dataset, beside a cache": (
        NumbersInTheDataset,
        lambda: lambda samples: torch.tensor([number for number, _ in samples]),
        "dataset.numbers",
    ),
}


@pytest.mark.parametrize("memory", ORDERS)
def test_what_depends_on_which_samples_came_before_is_refused_by_name(memory):
    """Loading the same samples again gives the same: others must come between, or before."""
    dataset, collate, name = ORDERS[memory]
    found = refused(dataset(), collate=collate())
    assert f"{name} " in found
    assert "loaded in another order" in found


def test_samples_of_different_lengths_that_nothing_remembers_pass():
    """Also where the longest of all is known, and where collate caches by length."""
    known = {}

    def cached(samples):
        longest = max(len(x) for x, _ in samples)
        known.setdefault(longest, torch.zeros(longest))
        return padded(samples, longest) + known[longest]

    assert len(loaded(Texts(), collate=cached)) == 4
    assert len(loaded(Texts(), collate=pads(lambda lengths: 9))) == 4


class Slow(Images):
    """Each sample takes so many seconds."""

    def __init__(self, clock, seconds, images):
        super().__init__(images)
        self.clock, self.seconds = clock, seconds

    def __getitem__(self, sample):
        self.clock.now += self.seconds
        return super().__getitem__(sample)


class Longest:
    """It pads to the longest sample so far."""

    def __init__(self):
        self.longest = 0

    def __call__(self, samples):
        self.longest = max(self.longest, *(int(each[0]) // 4 for each in samples))
        return torch.stack(samples) + self.longest


def checked(seconds, collate=None):
    """How many loads came before those of the first step, of 16 samples in each shard."""
    clock, images = FakeClock(), torch.arange(2048.0).reshape(512, 4)
    order = SampleOrder(seed=3, samples=512, global_batch=32, shards=2, epochs=1, tail=Tail.DROP)
    dataset = Slow(clock, seconds, images)
    loader = Loader(dataset=dataset, order=order, device=torch.device("cpu"), collate=collate, clock=clock)
    next(loader.steps(range(2), 1, check_first=True))
    return round((clock.now - 1000) / seconds) - 2 * 16


def test_slow_samples_are_loaded_again_in_one_shard_alone():
    """Of 0.5 s each: the 64 samples of fast ones, in two orders, would take a minute more."""
    assert checked(0.001) == 4 * 16 + 2 * 64
    assert checked(0.02) == 4 * 16 + 2 * 3 * 16
    assert checked(0.5) == 4 * 16


def test_an_order_that_counts_is_found_as_long_as_there_is_time_for_two_shards():
    for seconds in (0.001, 0.02):
        with pytest.raises(UsageError, match="loaded in another order"):
            checked(seconds, Longest())
    checked(0.5, Longest())  # an audit may find it
