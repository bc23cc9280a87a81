"""Retention never deletes a checkpoint that the run needs next."""

from dataclasses import replace

import pytest
from records import RECORD

from elastic.checkpoint.prune import may_count

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
    assert may_count(records, step=step, generation=generation, resumed_from=resumed_from) == counting
