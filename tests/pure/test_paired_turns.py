"""Ratios of paired turns do not see what hits both programs, and count whole steps alone."""

import random
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paired_turns import Turn, in_order, is_disturbed, ratio, whole_steps

seconds = st.floats(1e-4, 10.0)
pairs = st.lists(st.tuples(seconds, seconds), min_size=3, max_size=40)


@given(paces=st.lists(st.floats(0.1, 10.0), min_size=3, max_size=30), factor=st.floats(0.1, 10.0))
def test_what_makes_both_turns_of_a_pair_slower_is_not_in_the_ratio(paces: list[float], factor: float):
    """The machine's pace changes from pair to pair, and one program takes `factor` as long."""
    found = ratio([factor * pace for pace in paces], paces)
    assert (found.median, found.lower, found.upper) == pytest.approx((factor, factor, factor))
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.pairs == len(paces)


@given(pairs)
def test_half_of_the_pairs_are_between_the_quartiles(turns: list[tuple[float, float]]):
    """NumPy has percentiles of its own."""
    found = ratio([own for own, _ in turns], [other for _, other in turns])
    expected = np.percentile([own / other for own, other in turns], [25, 50, 75], method="weibull")
    assert (found.lower, found.median, found.upper) == pytest.approx(tuple(expected))


def test_the_error_is_the_spread_of_medians_of_normal_values():
    """Two thousand tables of 40 pairs: their medians differ by as much as each of them expects."""
    draw = random.Random(0)
    found = [ratio([draw.gauss(1.0, 0.1) for _ in range(40)], [1.0] * 40) for _ in range(2000)]
    spread = statistics.stdev(each.median for each in found)
    assert statistics.mean(each.error for each in found) == pytest.approx(spread, rel=0.1)


def test_a_few_turns_in_which_another_program_had_the_cores_say_little():
    calm = [1.0 + number / 1000 for number in range(20)]
    found = ratio([*calm, 9.0, 40.0], [1.0] * 22)
    assert found.median < 1.02 and found.upper < 1.02 and found.error < 0.01


@pytest.mark.parametrize(("own", "others"), [([], []), ([1.0, 1.0], [1.0, 1.0]), ([1.0] * 4, [1.0] * 3)])
def test_turns_that_are_no_pairs_are_refused(own: list[float], others: list[float]):
    with pytest.raises(ValueError, match="three or more pairs"):
        ratio(own, others)


@given(gaps=st.lists(st.integers(1, 50), max_size=40), began=st.integers(0, 500), length=st.integers(1, 500))
def test_only_steps_that_lie_in_a_turn_whole_are_counted(gaps: list[int], began: int, length: int):
    """The dumb twin asks each step for its own begin and end. Whole seconds, so that sums are
    exact.
    """
    ends = [float(sum(gaps[: number + 1])) for number in range(len(gaps))]
    ended = began + length
    whole = [(before, end) for before, end in pairwise(ends) if began < before and end < ended]
    found = whole_steps(ends, began, ended)
    if not whole:
        assert found is None
    else:
        assert found == Turn(steps=len(whole), seconds=sum(end - begin for begin, end in whole))
        assert found.step_s == found.seconds / found.steps


def test_each_program_is_the_last_of_a_round_as_often_as_the_first():
    rounds = [in_order(["ours", "plain", "DDP"], number) for number in range(4)]
    assert rounds == [["ours", "plain", "DDP"], ["DDP", "plain", "ours"]] * 2


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([], False), ([7], False), ([1, 2, 3], False), ([1, 3], True), ([1, 2, 2], True), ([4, 3], True)],
)
def test_steps_that_are_lost_or_done_again_are_seen(steps: list[int], expected: bool):
    assert is_disturbed(steps) is expected
