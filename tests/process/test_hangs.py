"""A worker without progress is found, shows its stacks, and is replaced; workers that wait for it
are not blamed. A node that is frozen in the middle of a write wakes up later and spoils nothing.
"""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_a_worker_that_hangs_shows_its_stacks_and_is_replaced(drill, undisturbed):
    """Rank 1 never returns from its loss function of step 10, and rank 0 waits for it in the sum of
    gradients.
    """
    options = ["--nproc-per-node", "2", "--hang-timeout", "3"]
    agent = drill.start(*options, "--faults", "step 10 rank 1 backward: hang")
    drill.ends_like(undisturbed, agent)
    (hang,) = drill.events("hang_detected")
    assert (hang["rank"], hang["place"], hang["generation"]) == (1, "step", 1)
    assert hang["silence_s"] > hang["limit_s"] == 3.0
    assert "in _inject" in drill.run.log(generation=1, rank=1).read_text()
    assert "most recent call first" not in drill.run.log(generation=1, rank=0).read_text()
    (culprit,) = (e for e in drill.events("worker_exited", generation=1) if not e["victim"])
    assert (culprit["rank"], culprit["signal"]) == (1, "SIGKILL")
    assert "in _inject" in drill.happens("worker_failed", rank=1)["traceback"]
    assert drill.events("generation_started", generation=2, restarts=1)
