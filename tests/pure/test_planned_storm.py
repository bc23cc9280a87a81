"""Nodes that leave as planned, one by one or all at once, lose no state."""

import pytest
from planned_storm import PlannedStorm
from random_storm import play


@pytest.mark.parametrize("seed", [110, 138, *range(20, 28)])
def test_planned_leaves_lose_no_state_at_any_moment(seed):
    """Nodes leave as planned, one by one or all at once; in the first two a node leaves before it
    enters a generation whose other members have no state yet. What must hold stands in
    `PlannedStorm.look` and `Storm._entered`.
    """
    play(seed, PlannedStorm)
