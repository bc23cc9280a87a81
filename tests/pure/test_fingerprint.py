"""Data sets and batches are told apart by their values, and by nothing that differs by process."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from elastic.data.fingerprint import contents_of, fingerprint


def batch():
    return {
        "image": torch.arange(6.0).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "wave": torch.tensor([1 + 2j]).conj(),
        "none": torch.zeros(0),
        "boxes": [np.arange(3), (1, 2.5, "name", b"raw", True, np.float32(2))],
        "texts": np.array([f"at {number}" for number in range(2)], dtype=object),
        "own": object(),
    }


def test_equal_batches_are_alike_whatever_their_memory():
    """Another stride or address, also of a text, is no other sample; nor an object without form."""
    other = copy.deepcopy(batch()) | {"image": torch.arange(6.0).reshape(2, 3).T.contiguous()}
    assert fingerprint(other) == fingerprint(batch())


@pytest.mark.parametrize(
    "path", [("image", 1, 1), ("half", 0), ("wave", 0), ("boxes", 0, 1), ("boxes", 1), ("texts", 0)]
)
def test_each_changed_value_is_seen(path):
    *parents, last = path
    other = value = batch()
    for each in parents:
        value = value[each]
    value[last] = None if isinstance(value[last], tuple) else value[last] + value[last]
    assert fingerprint(other) != fingerprint(batch())


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


class Own(Dataset):
    """A dataset with these attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 3

    def __getitem__(self, sample):
        raise AssertionError("no sample is to be loaded")


def differing(one, other):
    before, after = contents_of(one), contents_of(other)
    assert list(before) == list(after)
    return [name for name in before if before[name] != after[name]]


def whole(offset=0.0):
    return TensorDataset(torch.arange(60.0).reshape(20, 3) + offset, torch.arange(20))


def test_a_split_is_told_apart_by_its_indices():
    """Splits of a split, and of several data sets in one."""
    splits = [
        ConcatDataset([Subset(Subset(whole(), range(9)), [1, 2, 5]), Subset(whole(), last)])
        for last in ([3], [4])
    ]
    assert differing(*splits) == ["dataset.datasets[1].indices"]
    assert "dataset.datasets[0].dataset.dataset.tensors[1]" in contents_of(splits[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.ones(3, 5).T, torch.zeros(3, 5).T),
        (torch.ones(2, dtype=torch.complex64).conj(), 1j * torch.ones(2, dtype=torch.complex64)),
        (np.arange(9)[::-2], np.arange(9)[::2]),
        (np.array(["a/x", "a/y"]), np.array(["a/y", "a/x"])),
        ([1, 2, 3], [1, 3, 2]),
        ([("a.png", 0), ("b.png", 1)], [("a.png", 1), ("b.png", 1)]),
        ([torch.zeros(2)] * 99, [torch.ones(2)] * 99),
        ({"images": np.zeros(3)}, {"images": np.ones(3)}),
        (range(3), range(1, 4)),
    ],
)
def test_what_a_dataset_holds_is_told_apart(one, other):
    assert len(differing(Own(held=one), Own(held=other))) == 1
    assert differing(Own(held=one), Own(held=one)) == []


@given(st.integers(2, 400_000), st.data())
def test_a_shuffled_large_part_is_another_one(count, data):
    """Only some of its elements are looked at; another order changes nearly all of them."""
    other = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(count)
    if (other != np.arange(count)).any():
        assert differing(Own(rows=np.arange(count)), Own(rows=other)) == ["dataset.rows"]


def test_names_of_files_count_without_their_common_folder():
    """Each machine has its own copy. An order as a folder gives it differs between machines."""
    here, there = (
        [f"/{node}/train/{name}" for name in ("a/1.png", "a/2.png", "b/1.png")] for node in ("one", "another")
    )
    assert differing(Own(files=here), Own(files=there)) == []
    assert differing(Own(files=[(name, 0) for name in here]), Own(files=[(name, 0) for name in there])) == []
    assert differing(Own(files=here), Own(files=there[::-1])) == ["dataset.files"]
    assert differing(Own(files=["/x/a/1.png", "/x/b/1.png"]), Own(files=["/x/b/1.png", "/x/a/1.png"])) != []


def test_what_may_differ_between_processes_does_not_count(tmp_path):
    """Objects, functions, open files, single values, caches, files that are written to."""
    file = np.memmap(tmp_path / "file", mode="w+", shape=4)
    held_once = Own(cache=torch.ones(2), _Cached=[1], made=1.5, file=file, empty=[], one={"a": 1})
    assert contents_of(held_once) == {}
    held = (
        [object(), lambda: 0, file, {"a": object()}, torch.Tensor._make_subclass(OwnTensor, torch.ones(1))]
        for _ in range(2)
    )
    assert differing(*(Own(held=each) for each in held)) == []


class OwnTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_, **__):
        raise AssertionError("no code of the user is to be run")
