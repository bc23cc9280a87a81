"""Nodes that leave as planned, one by one or all at once, lose no state."""

import pytest
from planned_storm import PlannedStorm


@pytest.mark.parametrize("seed", [3, 109, 213, *range(20, 30)])
def test_planned_leaves_lose_no_state_at_any_moment(seed):
    """What must hold stands in `PlannedStorm.check` and `Storm._entered`. In the first three a node
    leaves before it enters a generation whose other members have no state yet.
    """
    storm = PlannedStorm(seed)
    try:
        storm.play()
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *storm.told])) from error
