"""What a shard holds depends on seed, epoch and samples: not on loading processes, world size, or
where loading began.
"""

import inspect
import multiprocessing
import os
import random
import traceback
from functools import partial

import numpy as np
import pytest
import torch
from orders import order_of
from torch.utils.data import Dataset, TensorDataset

from elastic.data.loader import Batch, Loader
from elastic.reduce.tree import span

CPU = torch.device("cpu")
PATIENCE_S = 240.0
in_order = partial(order_of, 22, seed=11, tail="pad")
ORDER = in_order(epochs=2)


class Augmented(Dataset):
    """Draws from all three global generators, another number of times for each sample."""

    def __len__(self):
        return ORDER.samples

    def __getitem__(self, sample):
        for _ in range(sample % 3):
            torch.rand(1)
        return {"sample": sample, "noise": [torch.rand(2), random.random(), np.random.rand()]}  # noqa: NPY002


def batches_of(dataset, shards=range(ORDER.shards), first_step=1, order=ORDER, **options):
    loader = Loader(dataset=dataset, order=order, device=CPU, **options)
    return [batch for step in loader.steps_of(lambda _step: shards, first_step) for batch in step]


def plain(batch):
    """A batch as values that compare with ==."""
    return {
        "epoch": batch.epoch,
        "shard": batch.shard,
        "indices": batch.indices.tolist(),
        "own": batch.uniform(2).tolist(),
        "sample": batch.data["sample"].tolist(),
        "noise": [column.tolist() for column in batch.data["noise"]],
    }


def shuffled(epoch):
    """Of another length in each epoch, and drawn from the generators that the epoch seeds."""
    return np.random.permutation(ORDER.samples)[: 9 + 5 * epoch]  # noqa: NPY002


@pytest.mark.parametrize("choice", ["permutation", "order", "weights"])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 0), (3, 1)])
def test_ranks_load_from_any_step_what_one_rank_loads(choice, world_size, workers):
    """In this process or in others, augmentation included, across epochs and padding."""
    order = {
        "permutation": lambda: ORDER,
        "order": lambda: in_order(order=shuffled, epochs=3),
        "weights": lambda: in_order(weights=range(ORDER.samples), steps=7),
    }[choice]()
    whole = [plain(batch) for batch in batches_of(Augmented(), order=order)]
    spans = [span(ORDER.shards, world_size, rank) for rank in range(world_size)]
    by_rank = [batches_of(Augmented(), each, 4, order=order, workers=workers) for each in spans]
    merged = []
    for step in range(order.steps - 3):
        for own, batches in zip(spans, by_rank, strict=True):
            merged += [plain(batch) for batch in batches[step * len(own) : (step + 1) * len(own)]]
    assert merged == whole[3 * ORDER.shards :]
    # Constant noise would be equal everywhere. What a weight draws again is augmented anew, but for
    # the two samples of the padding.
    for generator in range(3):
        noises = [str(number) for batch in merged for number in batch["noise"][generator]]
        repeated = len(noises) - len(set(noises))
        assert repeated <= (2 if choice == "weights" else len(noises) // 2)


class Traced(Dataset):
    """Each sample is the number of the process that loads it. It counts loads in all processes."""

    def __init__(self):
        self.loads = multiprocessing.Semaphore(0)

    def __getitem__(self, sample):
        self.loads.release()
        return os.getpid()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_next_step_is_loaded_whole_while_this_one_computes(workers):
    """One step is asked for, and the samples of two are loaded: nothing else makes them load."""
    dataset = Traced()
    steps = Loader(dataset=dataset, order=ORDER, device=CPU, workers=workers).steps_of(
        lambda _step: range(ORDER.shards), 1
    )
    next(steps)
    for _ in range(2 * ORDER.global_batch):
        assert dataset.loads.acquire(timeout=PATIENCE_S)


class Negated(TensorDataset):
    """A subclass whose samples are not those of its tensors."""

    def __getitem__(self, sample):
        return tuple(-tensor for tensor in super().__getitem__(sample))


def test_plain_tensors_are_indexed_whole_and_nothing_else_is():
    """A subclass is asked for its samples, and an own collate is called."""
    tensors = torch.randn(ORDER.samples, 3), torch.arange(ORDER.samples)
    collated = batches_of(TensorDataset(*tensors), collate=list)
    negated = batches_of(Negated(*tensors))
    for one, listed, other in zip(batches_of(TensorDataset(*tensors)), collated, negated, strict=True):
        x, y = one
        assert torch.equal(y, one.indices) and torch.equal(x, tensors[0][y])
        assert [int(number) for _, number in listed.data] == y.tolist()
        assert torch.equal(x, -other.data[0]) and torch.equal(y, -other.data[1])


class Unreadable(Dataset):
    def __len__(self):
        return ORDER.samples

    def __getitem__(self, sample):
        raise Truncated(f"sample {sample}")


class Truncated(Exception):  # noqa: N818
    """A class of the recipe's."""


def test_an_error_of_a_loading_process_has_its_class_and_line():
    line = inspect.getsourcelines(Unreadable)[1] + 5
    with pytest.raises(Truncated) as caught:
        batches_of(Unreadable(), workers=1)
    assert f"line {line}, in __getitem__" in "".join(traceback.format_exception(caught.value))


def test_draws_of_a_batch_belong_to_its_samples():
    """uniform(): a second call goes on; a sample has the same numbers in another batch of the
    epoch, others in another epoch.
    """

    def batch(indices, epoch=0):
        samples = torch.tensor(indices)
        return Batch(data=None, indices=samples, streams=samples, epoch=epoch, shard=0, seed=11)

    one = batch([4, 7])
    first, second = one.uniform(2), one.uniform(1)
    assert torch.equal(torch.cat([first, second], 1), batch([4, 7]).uniform(3))
    assert torch.equal(batch([1, 7, 9]).uniform(2)[1], first[1])
    assert not torch.equal(batch([4, 7], epoch=1).uniform(2), first)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_shards_of_steps_are_asked_no_further_ahead_than_said(workers):
    """Another cut for each step: loading processes must not go on to steps whose cut is not known
    yet; the batches are those of an undisturbed loader.
    """
    loader = Loader(dataset=Augmented(), order=ORDER, device=CPU, workers=workers)
    spans = [range(2), range(1, 4), range(1), range(1, 2), range(3, 4), range(4), range(2)]
    known, ahead = 1, loader.reads_ahead(len(spans[1]))

    def shards_of(step):
        assert step <= known + ahead, f"step {step} was asked for before step {known} was over"
        return spans[step % len(spans)]

    found, batches = [], loader.steps_of(shards_of, 1)
    for number in range(1, ORDER.steps + 1):
        known = number
        found.append([plain(batch) for batch in next(batches)])
    whole = list(map(plain, batches_of(Augmented())))
    for step, of_step in enumerate(found):
        expected = whole[step * ORDER.shards : (step + 1) * ORDER.shards]
        assert of_step == [expected[shard] for shard in spans[(step + 1) % len(spans)]]
