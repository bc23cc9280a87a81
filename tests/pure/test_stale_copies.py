"""A loop that changes a dataset of which data-loading processes have copies is told so."""

import pytest
import torch
from audited import ALONE, CLASSES, SAMPLES, Training, tensors
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import Dataset, Subset

from elastic.data import stale_copies
from elastic.errors import UsageError


class Augmented(Dataset):
    def __init__(self):
        self.x, self.y = tensors()
        self.epoch, self.loaded = 0, 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.loaded += 1
        return self.x[index] * (1 + self.epoch), self.y[index]


def train(dataset, change, **options):
    net = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    objects = {"net": net, "optimizer": optimizer}
    for step in Training(ALONE, objects, dataset=dataset, **{"audits": False, **options}).steps():
        if step.number == 3:
            change(dataset)
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        optimizer.step()
    return step.number


def set_epoch(dataset):
    dataset.epoch = 1


def test_the_loop_over_loading_processes_refuses_it():
    """At the step whose samples would be others after a restart."""
    with pytest.raises(UsageError, match=r"step 3: the loop changed dataset\.epoch.*workers=1"):
        train(Augmented(), set_epoch, workers=1)


def test_without_loading_processes_the_loop_may_change_its_dataset():
    assert train(Augmented(), set_epoch, workers=0) == 6


def test_what_loading_changes_is_not_the_loops():
    """Audits load in the training process, where the dataset counts."""
    assert train(Augmented(), lambda _: None, workers=1, audits=True) == 6


def test_a_change_before_the_first_samples_is_in_the_copies():
    dataset = Augmented()
    steps = Training(ALONE, {"net": nn.Linear(6, CLASSES)}, dataset=dataset, workers=1, audits=False).steps()
    step = next(steps)
    set_epoch(dataset)
    step.sum(lambda batch: batch.data[0].sum(0))


def test_a_dataset_inside_another_is_looked_at():
    whole = Subset(Subset(Augmented(), range(10)), range(5))
    before = stale_copies.attributes_of(whole)
    assert stale_copies.changed(before, stale_copies.attributes_of(whole)) == []
    set_epoch(whole.dataset.dataset)
    assert stale_copies.changed(before, stale_copies.attributes_of(whole)) == [
        "dataset.dataset.dataset.epoch"
    ]
