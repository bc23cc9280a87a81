"""A worker without progress is found, shows its stacks, and is replaced; workers that wait for it
are not blamed. A node that is frozen in the middle of a write wakes up later and spoils nothing.
"""

import os
import signal


def test_a_worker_that_hangs_shows_its_stacks_and_is_replaced(drill, undisturbed):
    """Rank 1 never returns from its loss function of step 10, and rank 0 waits for it in the sum of
    gradients.
    """
    options = ["--nproc-per-node", "2", "--hang-timeout", "3"]
    drill.ends_like(undisturbed, drill.start(*options, "--faults", "step 10 rank 1 backward: hang"))
    (hang,) = drill.events("hang_detected")
    assert (hang["rank"], hang["place"], hang["generation"]) == (1, "step", 1)
    assert hang["silence_s"] > hang["limit_s"] == 3.0
    assert "in _inject" in drill.run.log(generation=1, rank=1).read_text()
    assert "most recent call first" not in drill.run.log(generation=1, rank=0).read_text()
    (culprit,) = (e for e in drill.events("worker_exited", generation=1) if not e["victim"])
    assert (culprit["rank"], culprit["signal"]) == (1, "SIGKILL")
    assert "in _inject" in drill.happens("worker_failed", rank=1)["traceback"]
    assert drill.events("generation_started", generation=2, restarts=1)


def test_a_stopped_worker_is_blamed_not_the_one_that_waits(drill, undisturbed):
    """Rank 1 gets SIGSTOP while both stand before step 10; rank 0 goes on into the step and waits
    there.
    """
    agent = drill.start_before(10, "--nproc-per-node", "2", "--hang-timeout", "5", ranks=2)
    os.kill(drill.pid_of_rank(1, generation=1), signal.SIGSTOP)
    drill.open(10)
    drill.ends_like(undisturbed, agent)
    (hang,) = drill.events("hang_detected")
    assert hang["rank"] == 1
    assert "a process that a signal stopped" in hang["reason"]
    assert hang["reason"] in agent.output
    # It shows its stacks although it was stopped.
    assert "wait_at_gate" in drill.run.log(generation=1, rank=1).read_text()
