"""Retention never deletes a checkpoint that the run needs next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.prune import counted, to_delete, to_sweep

steps = st.lists(st.integers(0, 60), max_size=12)


def dumb_twin(committed, keep):
    """Asks of each step on its own, by counting, whether it is among the newest."""
    return [step for step in sorted(set(committed)) if sum(other > step for other in set(committed)) >= keep]


@given(steps, st.integers(1, 5))
def test_the_same_steps_go_as_by_counting_and_never_the_newest(committed, keep):
    """Compares with a twin that was written another way."""
    gone = to_delete(committed, keep=keep)
    assert gone == dumb_twin(committed, keep)
    assert not committed or max(committed) not in gone


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(keep):
    """A policy that would delete everything is a mistake of the person."""
    with pytest.raises(ValueError, match="expected to keep"):
        to_delete([1], keep=keep)


class Record:
    def __init__(self, step, generation):
        self.step, self.generation = step, generation


def test_a_checkpoint_passed_over_at_resume_is_not_the_newest():
    """Steps 1000 and 920 did not load, the run resumed from 900 and saved 950.

    Counting 1000 with keep=1 would delete 950 and 900.
    """
    records = [Record(1000, 1), Record(950, 2), Record(920, 1), Record(900, 1)]
    steps = counted(records, step=950, generation=2, resumed_from=900)
    assert steps == {950, 900}
    assert to_delete(steps, keep=1) == [900]


def test_a_checkpoint_passed_over_stays_so_after_a_memory_resume():
    """Step 1000 did not load. A later generation, or the agent of a drained one, saves 960 without
    knowing that the run resumed from 900.
    """
    records = [Record(1000, 1), Record(960, 3), Record(950, 2)]
    assert counted(records, step=960, generation=3, resumed_from=None) == {960, 950}


def test_a_checkpoint_passed_over_stays_so_beyond_it():
    """Step 200 did not load, generation 2 went on from 100, and 3 from its memory. Once no later
    generation's checkpoint is below 200, it is the oldest and may go.
    """
    records = [Record(210, 3), Record(200, 1), Record(160, 3), Record(100, 1)]
    steps = counted(records, step=210, generation=3, resumed_from=None)
    assert steps == {210, 160, 100}
    assert to_delete(steps, keep=2) == [100]
    records = [Record(260, 3), Record(210, 3), Record(200, 1)]
    assert to_delete(counted(records, step=260, generation=3, resumed_from=None), keep=2) == [200]


@given(st.dictionaries(st.text("ab", max_size=3), st.integers(0, 5)), st.floats(0, 100), st.floats(0, 100))
def test_no_attempt_of_this_or_a_newer_generation_is_swept(uncommitted, seen_at, now):
    """A living writer's attempt is of the newest generation; whatever the clock says, it stays."""
    swept = to_sweep(
        uncommitted, dict.fromkeys(uncommitted, seen_at), now=now, generation=3, save_deadline_s=10.0
    )
    assert all(uncommitted[attempt] < 3 and now - seen_at > 20.0 for attempt in swept)
    assert len(swept) == sum(written_by < 3 and now - seen_at > 20.0 for written_by in uncommitted.values())


def test_an_attempt_seen_for_the_first_time_is_not_swept():
    """Its age is unknown, so it is taken as new."""
    assert to_sweep({"a": 1}, {}, now=1e9, generation=3, save_deadline_s=10.0) == []
