"""Retention never deletes a checkpoint that the run needs next."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import RECORD

from elastic.checkpoint.prune import may_count, to_sweep

GONE_BACK = [
    # Steps 1000 and 920 did not load, the run resumed from 900 and saved 950. Counting 1000 with
    # keep=1 would delete 950 and 900.
    ({1000: 1, 950: 2, 920: 1, 900: 1}, 950, 2, 900, {950, 900}),
    # Step 1000 did not load. A later generation, or the agent of a drained one, saves 960 without
    # knowing that the run resumed from 900.
    ({1000: 1, 960: 3, 950: 2}, 960, 3, None, {960, 950}),
    # Step 200 did not load, generation 2 went on from 100, and 3 from its memory. Once no later
    # generation's checkpoint is below 200, it is the oldest and may go.
    ({210: 3, 200: 1, 160: 3, 100: 1}, 210, 3, None, {210, 160, 100}),
    ({260: 3, 210: 3, 200: 1}, 260, 3, None, {260, 210, 200}),
]


@pytest.mark.parametrize(("generations", "step", "generation", "resumed_from", "counting"), GONE_BACK)
def test_a_checkpoint_passed_over_is_not_among_the_newest(
    generations, step, generation, resumed_from, counting
):
    """generations: by step, of the records that are there."""
    records = [replace(RECORD, step=step, generation=written) for step, written in generations.items()]
    found = may_count(records, step=step, generation=generation, resumed_from=resumed_from)
    assert found == counting


@given(st.dictionaries(st.text("ab", max_size=3), st.integers(0, 5)), st.floats(0, 100), st.floats(0, 100))
def test_no_attempt_of_this_or_a_newer_generation_is_swept(uncommitted, seen_at, now):
    """A living writer's attempt is of the newest generation; whatever the clock says, it stays."""
    swept = to_sweep(
        uncommitted, dict.fromkeys(uncommitted, seen_at), now=now, generation=3, save_deadline_s=10.0
    )
    assert all(uncommitted[attempt] < 3 and now - seen_at > 20.0 for attempt in swept)
    assert len(swept) == sum(written_by < 3 and now - seen_at > 20.0 for written_by in uncommitted.values())
