"""A loop that changes a dataset of which data-loading processes have copies is told so."""

from enum import Enum

import pytest
import torch
from audited import ALONE, CLASSES, SAMPLES, Training, tensors
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import ConcatDataset, Dataset, Subset

from elastic.data import stale_copies
from elastic.errors import UsageError


class Mode(Enum):
    CLEAN, NOISY = 1, 2


class Noise:
    def __init__(self):
        self.strength = 0.0

    def __call__(self, x):
        return x + self.strength * torch.rand_like(x)


class Augmented(Dataset):
    def __init__(self):
        self.x, self.y = tensors()
        self.epoch, self.loaded, self.file, self.transform = 0, 0, None, Noise()
        self.weights = torch.ones(SAMPLES)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.loaded += 1
        self.file = self.file or iter([1])
        return self.transform(self.x[index]) * (1 + self.epoch) * self.weights[index], self.y[index]


def set_epoch(dataset):
    dataset.epoch = 1


def set_strength(dataset):
    dataset.transform.strength = 0.5


def set_transform(dataset):
    dataset.transform = Noise()


def set_weights(dataset):
    dataset.weights[3] = 0.5


def add_attribute(dataset):
    dataset.strength = 0.5


CHANGES = [
    (set_epoch, "dataset.epoch, which was 0 and is 1"),
    (set_strength, "dataset.transform.strength, which was 0.0 and is 0.5"),
    (set_transform, "dataset.transform, which was a Noise and is a Noise"),
    (set_weights, "dataset.weights, which was a Tensor and is a Tensor"),
    (add_attribute, "dataset.strength, which was nothing and is 0.5"),
]


def train(dataset, change, *, workers, audits=False):
    torch.manual_seed(0)
    net = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"net": net, "optimizer": optimizer}
    inner = dataset.dataset if isinstance(dataset, Subset) else dataset
    for step in Training(ALONE, objects, dataset=dataset, workers=workers, audits=audits).steps():
        if step.number == 3:
            change(inner)
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        optimizer.step()
    return step.number


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_a_change_that_loading_processes_do_not_see_is_refused_at_its_step(change, said):
    dataset = Augmented()
    before = stale_copies.attributes_of(dataset)
    stale_copies.check(before, stale_copies.attributes_of(dataset), set(), 2, 1)
    change(dataset)
    with pytest.raises(
        UsageError, match="have copies of the dataset from the beginning of the loop"
    ) as refused:
        stale_copies.check(before, stale_copies.attributes_of(dataset), set(), 3, 1)
    assert f"step 3: the loop changed {said}" in str(refused.value)


def test_the_loop_over_loading_processes_refuses_it():
    """At the step whose samples would be others after a restart."""
    with pytest.raises(UsageError, match=r"step 3: the loop changed dataset\.epoch.*workers=1"):
        train(Augmented(), set_epoch, workers=1)


def test_without_loading_processes_the_loop_may_change_its_dataset():
    assert train(Augmented(), set_epoch, workers=0) == 6


def test_what_loading_changes_is_not_the_loops():
    """Audits load in the training process, where the dataset counts and opens its file."""
    assert train(Augmented(), lambda _: None, workers=1, audits=True) == 6


def test_a_change_before_the_first_samples_is_in_the_copies():
    dataset = Augmented()
    steps = Training(ALONE, {"net": nn.Linear(6, CLASSES)}, dataset=dataset, workers=1, audits=False).steps()
    step = next(steps)
    set_epoch(dataset)
    step.sum(lambda batch: batch.data[0].sum(0))


def test_datasets_inside_others_are_looked_at():
    inner, other = Augmented(), Augmented()
    whole = ConcatDataset([Subset(inner, range(10)), other])
    before = stale_copies.attributes_of(whole)
    assert stale_copies.changed(before, stale_copies.attributes_of(whole)) == []
    set_epoch(inner)
    set_strength(other)
    assert stale_copies.changed(before, stale_copies.attributes_of(whole)) == [
        "dataset.datasets[0].dataset.epoch",
        "dataset.datasets[1].transform.strength",
    ]


@pytest.mark.parametrize("before", [None, Mode.CLEAN])
@pytest.mark.parametrize("is_of_class", [False, True])
def test_a_member_of_an_enum_is_a_word_of_the_dataset(before, is_of_class):
    """It was taken for an object with contents, whose first private list was named."""

    class Samples(Dataset):
        mode = before

    dataset = Samples()
    if not is_of_class:
        dataset.mode = before
    read = stale_copies.attributes_of(dataset)
    dataset.mode = Mode.NOISY
    assert stale_copies.changed(read, stale_copies.attributes_of(dataset)) == ["dataset.mode"]
