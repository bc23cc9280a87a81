"""Datasets whose samples depend on what was loaded before are found at a run's first samples."""

import random
from collections import deque
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import UsageError

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


class Counts(Images):
    def __getitem__(self, sample):
        self.calls += 1
        return self.images[sample] * self.calls


class CountsLoads(Images):
    """For itself: its samples do not depend on it."""

    def __getitem__(self, sample):
        self.calls += 1
        return self.images[sample]


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


MEMORIES = {
    "tensor": CutsOut,
    "array": lambda: CutsOut(ROWS.numpy().copy()),
    "list of tensors": lambda: CutsOut(list(ROWS.clone())),
    "subset": lambda: Subset(CutsOut(), range(16)),
    "parts": lambda: ConcatDataset([Subset(CutsOut(), range(8))] * 2),
    "counter": Counts,
    "counter of a transform": CountsBelow,
    "counter of one of several": CountsBelowInAList,
    "counter of a class": CountsInClass,
    "generator": DrawsItself,
    "iterator": ReadsIterator,
    "global": CutsOutOfAGlobal,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_dataset_that_remembers_is_refused(memory, workers):
    """Data-loading processes have copies; the check runs in the process that began them."""
    assert "it, or collate, counts its calls" in refused(MEMORIES[memory](), workers=workers)


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

    assert "writes into data that it reads" in refused(Views(), collate=noisy)


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


@pytest.mark.parametrize("collate", [Centred(), CentredByATensor(), centred])
def test_a_running_mean_that_collate_keeps_is_refused(collate):
    """Each process would have that of the batches which it loaded."""
    assert "by step.sum" in refused(Images(), collate=collate)


LENGTHS = [9, 4, 6, 5, 7, 3, 8, 8, 2, 9, 4, 6, 5, 7, 3, 8]


class Texts(Dataset):
    """Of different lengths."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, sample):
        return torch.full((LENGTHS[sample],), float(sample))


def padded(samples):
    """To the longest of the batch."""
    length = max(map(len, samples))
    return torch.stack([pad(x, (0, length - len(x))) for x in samples])


def test_samples_of_different_lengths_that_nothing_remembers_pass():
    assert len(loaded(Texts(), collate=padded)) == 4


def test_the_first_shard_alone_is_loaded_three_times():
    """Twice under its own random streams; slow samples delay the run by as little as that."""
    dataset = CountsLoads()
    loader = Loader(dataset=dataset, order=ORDER, device=torch.device("cpu"))
    next(loader.steps(range(2), 1, check_first=True))
    assert dataset.calls == (3 + 2) * 4
