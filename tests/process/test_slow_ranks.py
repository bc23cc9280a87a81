"""Each line of metrics says which rank the others waited for in that step."""

import pytest
import run_records

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_the_rank_that_stood_still_in_a_step_is_its_slowest(drill, undisturbed):
    """Once each of two ranks, in different parts of the step: for 2 s, while the other waits."""
    plan = "step 9 rank 1 forward: pause 2s; step 15 rank 0 optimizer: pause 2s"
    drill.start("--nproc-per-node", "2", "--faults", plan).ends_with(0)
    drill.is_like(undisturbed)
    lines = {line["step"]: line for line in run_records.lines(drill.run.metrics)}
    assert "slowest_rank" not in lines[1]  # nothing was measured yet
    # What follows the sum of a step counts to the next one.
    for step, rank in [(9, 1), (16, 0)]:
        assert lines[step]["slowest_rank"] == rank
        assert lines[step]["slowest_s"] >= 2
