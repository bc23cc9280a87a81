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


def texts(*words):
    return np.array(words, dtype=object)


def test_an_array_of_objects_counts_by_what_it_holds():
    """Its bytes are addresses: those of equal texts, each made anew, differ."""
    made = [texts(*("".join(["wo", str(number)]) for number in range(3))) for _ in range(2)]
    assert fingerprint(made[0]) == fingerprint(made[1])
    assert fingerprint(texts("wo0", "wo1", "wo3")) != fingerprint(made[0])


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype)")
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(torch.Tensor.to_sparse, id="coordinates"),
        pytest.param(torch.Tensor.to_sparse_csr, id="csr"),
        pytest.param(torch.Tensor.to_sparse_csc, id="csc"),
        pytest.param(lambda dense: dense.to_sparse_bsr((1, 1)), id="bsr"),
        pytest.param(lambda dense: torch.nested.nested_tensor(list(dense)), id="nested"),
        pytest.param(lambda dense: torch.nested.nested_tensor(list(dense), layout=torch.jagged), id="jagged"),
    ],
)
def test_a_tensor_that_is_not_dense_counts_by_what_it_holds(form):
    """These have no memory of their shape that could be read as bytes."""
    other = torch.eye(3)
    other[2, 2] = 2
    assert fingerprint(form(torch.eye(3))) == fingerprint(form(torch.eye(3))) != fingerprint(form(other))


@pytest.mark.parametrize("as_given", [torch.Tensor.numpy, torch.Tensor.clone])
def test_all_nans_count_as_one(as_given):
    """Their other bits may depend on where the operands of an addition lay."""
    bits = torch.tensor([0x7FC00000, 0x7FC00001, -0x00400000], dtype=torch.int32)
    nans = bits.view(torch.float32)
    assert fingerprint(as_given(nans)) == fingerprint(as_given(torch.full((3,), torch.nan)))
    assert fingerprint(as_given(nans)) != fingerprint(as_given(torch.zeros(3)))
    waves = torch.view_as_complex(torch.stack([torch.ones(3), nans], 1))
    others = torch.view_as_complex(torch.stack([torch.ones(3), torch.full((3,), torch.nan)], 1))
    assert fingerprint(as_given(waves)) == fingerprint(as_given(others)) != fingerprint(as_given(others + 1))
