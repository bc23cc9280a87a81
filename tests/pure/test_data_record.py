"""A state is trained further on the data that it was trained on, or not at all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.order import SORTED_UP_TO, Shuffle
from elastic.data.record import (
    DataRecord,
    check_beginning,
    check_ranks,
    check_resume,
    parse,
    record_of,
)
from elastic.data.sampling import Sampling
from elastic.errors import UsageError

SAMPLES, BATCH = 24, 8


def order_of(samples=SAMPLES, **arguments):
    chosen = {"epochs": None, "steps": None, "tail": "drop", "weights": None, "order": None} | arguments
    return Sampling(**chosen).order_of(samples=samples, seed=1, global_batch=BATCH, shards=4)


def beside(order, step):
    return parse(record_of(order, order.position(step)[0]).to_json())


def resumes(there, order, step, **now):
    return check_resume(there, record_of(order, 0, **now), order, step, "NEW_RUN")


def growing(epoch):
    return range(8 * (1 + epoch % 3))


CHOICES = [
    {"epochs": 4},
    {"steps": 10},
    {"epochs": 4, "tail": "pad"},
    {"epochs": 4, "weights": range(SAMPLES)},
    {"epochs": 4, "order": growing},
    {"steps": 7, "order": growing},
]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_same_data_resume_without_a_word_at_every_step(choice):
    order = order_of(**choice)
    for step in range(1, order.steps + 1):
        assert resumes(beside(order, step), order_of(**choice), step) == ""


@given(st.sampled_from(CHOICES), st.sampled_from(CHOICES), st.integers(1, 7))
def test_other_choices_than_before_are_refused_or_said(before, now, step):
    """Any pair of choices but for their lengths: they are other data, or another length is said."""
    there, here = order_of(**before), order_of(**now)
    drawn = [{name: choice.get(name) for name in ("tail", "weights", "order")} for choice in (before, now)]
    if drawn[0] != drawn[1]:
        with pytest.raises(UsageError):
            resumes(beside(there, step), here, step)
    else:
        said = resumes(beside(there, step), here, step)
        assert (said == "") == ((there.steps, there.epochs) == (here.steps, here.epochs))


def test_other_data_are_refused_with_both_numbers_and_the_way_on():
    with pytest.raises(UsageError) as refused:
        resumes(beside(order_of(epochs=2), 3), order_of(samples=32, epochs=2, tail="pad"), 3)
    said = str(refused.value)
    assert "the state of step 3 was trained on other data" in said
    assert "(samples: 24 there, 32 here; tail: drop there, pad here)" in said
    assert "begin a new run from this state: NEW_RUN" in said


@pytest.mark.parametrize(
    ("before", "now", "step", "says"),
    [
        (
            {"epochs": 2},
            {"epochs": 4},
            3,
            "6 steps (2 epochs), and the recipe now asks for 12 (4): it goes on to",
        ),
        ({"epochs": 4}, {"steps": 5}, 3, "it ends after step 5"),
        ({"epochs": 4}, {"epochs": 2}, 7, "it has step 7 already and ends there, not after step 6"),
    ],
)
def test_another_length_is_said_and_goes_on(before, now, step, says):
    assert says in resumes(beside(order_of(**before), step), order_of(**now), step)


def test_a_state_that_was_trained_on_nothing_goes_on_with_any_data():
    """Step 0 of a run that began from another one's state, and was corrected before it trained."""
    assert resumes(record_of(order_of(epochs=2), 0), order_of(samples=9, steps=1), 0) == ""


def test_an_order_is_compared_as_far_as_it_was_trained():
    """With another length: epochs that the state has seen must be the same, later ones need not be
    there yet. With the same length all epochs must be the same.
    """

    def changed(epoch):
        return growing(epoch) if epoch < 2 else range(16)

    before = order_of(epochs=4, order=growing)  # ends after steps 1, 3, 6 and 7
    longer, other = order_of(epochs=6, order=changed), order_of(epochs=4, order=changed)
    assert "it goes on" in resumes(beside(before, 3), longer, 3)
    with pytest.raises(UsageError, match=r"order: another one \(.*\) there, another one \(.*\) here"):
        resumes(beside(before, 4), longer, 4)
    with pytest.raises(UsageError, match="other data"):
        resumes(beside(before, 3), other, 3)


@pytest.mark.parametrize(
    ("field", "value"), [("samples", 23), ("steps", 9), ("weights", "ab"), ("order", "cd"), ("tail", "pad")]
)
def test_ranks_with_other_data_are_told_which(field, value):
    """A rank that took its own part of the data, or drew weights or an order of its own."""
    same = record_of(order_of(epochs=4), 0)
    check_ranks([same, same])
    with pytest.raises(UsageError) as refused:
        check_ranks([same, same, replace(same, **{field: value})])
    assert f"found {field} " in str(refused.value)
    assert "on rank 2" in str(refused.value)


def test_a_record_of_a_later_version_is_read():
    """It may have more fields."""
    record = record_of(order_of(epochs=4), 0)
    assert parse(record.to_json().replace("{", '{"more": 1, ', 1)) == record
    assert isinstance(record, DataRecord)


SPLIT = {"dataset.indices": "aa", "dataset.dataset.tensors[0]": "bb"}


def test_other_samples_are_refused_with_the_part_that_differs_and_how_to_split():
    """A split that was drawn by the global generator, in a generation that drew other numbers."""
    order = order_of(epochs=4)
    there = record_of(order, 1, SPLIT)
    assert resumes(there, order, 5, contents=SPLIT) == ""
    with pytest.raises(UsageError) as refused:
        resumes(there, order, 5, contents=SPLIT | {"dataset.indices": "cc"})
    assert "(the contents of dataset.indices)" in str(refused.value)
    assert "generator=torch.Generator().manual_seed(0)" in str(refused.value)


def test_records_without_contents_and_parts_that_a_version_does_not_know_are_no_difference():
    order = order_of(epochs=4)
    assert resumes(parse(record_of(order, 1).to_json()), order, 5, contents=SPLIT) == ""
    assert resumes(record_of(order, 1, SPLIT), order, 5, contents=SPLIT | {"dataset.more": "dd"}) == ""


def test_contents_without_one_part_in_common_are_other_data():
    """A split, and now the whole data set, which has as many samples."""
    order = order_of(epochs=4)
    with pytest.raises(UsageError, match=r"the contents of dataset\.tensors\[0\]\)"):
        resumes(record_of(order, 1, SPLIT), order, 5, contents={"dataset.tensors[0]": "bb"})


def test_other_random_numbers_before_the_loop_are_said_by_the_name_of_their_generator():
    order = order_of(epochs=4)
    there = parse(record_of(order, 1, {}, {"torch": "aa", "numpy": "bb"}).to_json())
    same = {"torch": "aa", "numpy": "bb", "random": "ee"}
    assert resumes(there, order, 5, contents={}, generators=same) == ""
    said = resumes(there, order, 5, contents={}, generators=same | {"torch": "cc"})
    assert (
        "the script drew other random numbers (torch) than when the run began, or when its newest state"
        in said
    )


def test_a_beginning_on_other_data_than_at_first_is_said():
    order, other = order_of(epochs=4), order_of(samples=32, epochs=4)
    first = record_of(order, 0, SPLIT, {"torch": "aa"})
    assert check_beginning(parse(first.to_json()), first) == ""
    said = check_beginning(first, record_of(other, 0, SPLIT | {"dataset.indices": "cc"}))
    assert "other data than at first (its samples, dataset.indices)" in said
    assert "drew other random numbers (torch)" in check_beginning(
        first, replace(first, generators={"torch": "bb"})
    )


def test_ranks_whose_samples_differ_are_told_which_part():
    """Files listed in the order of each machine's folder, for instance. Draws may differ."""
    same = record_of(order_of(epochs=4), 0, SPLIT, {"torch": "aa"})
    check_ranks([same, replace(same, generators={"torch": "bb"})])
    with pytest.raises(UsageError, match=r"other contents of dataset\.indices on rank 1 than on rank 0"):
        check_ranks([same, replace(same, contents=SPLIT | {"dataset.indices": "cc"})])


LARGE = SORTED_UP_TO + 1


def test_a_state_that_was_shuffled_in_another_way_is_refused():
    new = order_of(LARGE, steps=9)
    with pytest.raises(
        UsageError, match=r"order: the shuffle of large data sets \([0-9a-f]{16}\) there, none here"
    ):
        resumes(beside(new, 5), replace(new, shuffle=Shuffle.SORT), 5)


def test_a_run_that_begins_again_in_another_order_says_so():
    there = record_of(order_of(epochs=4, order=growing), 0)
    assert "other data than at first (its order)" in check_beginning(there, record_of(order_of(epochs=4), 0))
    longer = record_of(order_of(epochs=5, order=growing), 0)
    assert check_beginning(there, longer) == ""
