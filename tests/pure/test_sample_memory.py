"""Datasets whose samples depend on what was loaded before are found at a run's first samples."""

import random
from collections import deque
from functools import lru_cache

import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import UsageError

ORDER = SampleOrder(seed=3, samples=16, global_batch=8, shards=2, epochs=1, tail=Tail.DROP)
ROWS = torch.arange(64.0).reshape(16, 4)


class Images(Dataset):
    """Exact: it augments a copy."""

    def __init__(self, images=None):
        self.images = ROWS.clone() if images is None else images
        self.calls = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, sample):
        return self.images[sample] + torch.rand(4)


class CutsOut(Images):
    """Half of the time, in place."""

    def __getitem__(self, sample):
        if random.random() < 0.5:
            self.images[sample][random.randrange(4)] = -1
        return torch.as_tensor(self.images[sample]) + 0


class Counts(Images):
    def __getitem__(self, sample):
        self.calls += 1
        return self.images[sample] * self.calls


def loaded(dataset, **options):
    loader = Loader(dataset=dataset, order=ORDER, device=torch.device("cpu"), **options)
    return [
        batch.data for step in loader.steps_of(lambda _step: range(2), 1, check_first=True) for batch in step
    ]


MEMORIES = {
    "tensor": CutsOut,
    "subset": lambda: Subset(CutsOut(), range(16)),
    "counter": Counts,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_dataset_that_remembers_is_refused(memory, workers):
    """Data-loading processes have copies; the check runs in the process that began them."""
    with pytest.raises(UsageError, match="found other ones at a second load"):
        loaded(MEMORIES[memory](), workers=workers)


class KeepsRead(Images):
    """Caches of each kind, of what needs no random number; it counts what it read."""

    def __init__(self):
        super().__init__()
        self.cache, self.last = {}, deque(maxlen=3)

    def __getitem__(self, sample):
        if sample not in self.cache:
            self.calls += 1
            self.cache[sample] = self.images[sample].clone()
            self.last.append((sample, self.cache[sample]))
        return self.cache[sample] + self.decoded(sample) + torch.rand(4)

    @lru_cache  # noqa: B019 - as recipes do it
    def decoded(self, sample):
        return self.images[sample] * 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [KeepsRead, lambda: Subset(KeepsRead(), list(range(16))[::-1])])
def test_a_cache_of_what_was_read_passes_and_changes_no_sample(dataset, workers):
    found = loaded(dataset(), workers=workers)
    unchecked = Loader(dataset=dataset(), order=ORDER, device=torch.device("cpu")).steps_of(
        lambda _step: range(2), 1
    )
    flat = [batch.data for step in unchecked for batch in step]
    assert all(torch.equal(one, other) for one, other in zip(flat, found, strict=True))


class Views(Images):
    def __getitem__(self, sample):
        return self.images[sample]


def noisy(samples):
    """In place: these are views of the dataset's tensor."""
    return default_collate([sample.add_(torch.rand(1)) for sample in samples])


def test_a_collate_that_writes_into_the_data_is_refused():
    with pytest.raises(UsageError, match="or collate, counts"):
        loaded(Views(), collate=noisy)
