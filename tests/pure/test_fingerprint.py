"""Two loads of a batch are told apart by any value in it, and by nothing else."""

import copy

import numpy as np
import pytest
import torch

from elastic.data.fingerprint import fingerprint


def batch():
    return {
        "image": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "wave": torch.tensor([1 + 2j]).conj(),
        "none": torch.zeros(0),
        "boxes": [np.arange(3), (1, 2.5, "name", b"raw", True, np.float32(2))],
        "own": object(),
    }


def change(value, *path):
    *parents, last = path
    for each in parents:
        value = value[each]
    value[last] = None if isinstance(value[last], tuple) else value[last] + value[last]


def test_equal_batches_are_alike_whatever_their_memory():
    """Another stride or address is no other sample; nor is an object of a type without a form."""
    other = copy.deepcopy(batch()) | {"image": torch.arange(6.0).reshape(2, 3).T.contiguous()}
    assert fingerprint(other) == fingerprint(batch())


@pytest.mark.parametrize(
    "path", [("image", 1, 2 - 1), ("half", 0), ("wave", 0), ("boxes", 0, 1), ("boxes", 1)]
)
def test_each_changed_value_is_seen(path):
    other = batch()
    change(other, *path)
    assert fingerprint(other) != fingerprint(batch())
