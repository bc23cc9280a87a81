"""Another data set for run.evaluate after a resume is refused; several at one line may differ."""

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from elastic.errors import UsageError
from elastic.train.evaluated_data import EvaluatedData, place_of_call, sha256_of

HERE = "recipe.py:9"
DATA = TensorDataset(torch.arange(8.0))


class Lazy(torch.utils.data.Dataset):
    """Fills what it has read, which each rank reads a part of."""

    def __init__(self):
        self.images, self.targets = [None] * 8, [0] * 8


def given(*hashes, there=None):
    process = EvaluatedData(new_run="NEW_RUN")
    process.resume(there or {})
    for sha256 in hashes:
        process.add(HERE, sha256)
    return process.saved()


def test_another_data_set_at_the_same_line_after_a_resume_is_refused():
    there = given("aa", "aa")
    assert given("aa", there=there) == there == given(there=there)
    with pytest.raises(UsageError, match=r"run\.evaluate \(recipe\.py:9\): this data set is another one"):
        given("bb", there=there)


def test_a_data_set_that_was_evaluated_before_the_loop_is_compared_when_the_state_is_there():
    process = EvaluatedData(new_run="NEW_RUN")
    process.add(HERE, "bb")
    with pytest.raises(UsageError, match="another one"):
        process.resume(given("aa", "aa"))


@pytest.mark.parametrize("before", [("aa",), ("aa", "bb"), ("aa", "bb", "bb"), ()])
def test_a_line_that_may_have_several_data_sets_is_not_compared(before):
    """A pool that grows, a loop over two sets, and one call alone, which does not tell."""
    there = given(*before)
    given("cc", "cc", there=there)
    assert given("cc", there=given("dd", "dd", "aa"))  # said already: several


def test_splits_and_tensors_count_and_what_is_filled_while_it_is_read_does_not():
    splits = [sha256_of(Subset(DATA, indices)) for indices in ([0, 1], [0, 2], [0, 1])]
    assert splits[0] == splits[2] != splits[1]
    assert sha256_of(TensorDataset(torch.zeros(8))) != sha256_of(DATA)
    lazy = Lazy()
    before = sha256_of(lazy)
    lazy.images[3] = torch.zeros(2)
    assert sha256_of(lazy) == before
    assert sha256_of([1.0, 2.0]) == ""


def test_a_place_is_the_line_of_the_recipe():
    assert place_of_call().startswith("test_evaluated_data.py:")
