"""A recipe that leaves its loop early ends the run there, with the state of that step.

tests/pure/test_leaving.py has each way out, and what is refused.
"""

import pytest

LEFT = "stopped by the recipe after step 9 of 18 (the recipe left the loop)"


@pytest.fixture
def leave(recipes):
    """Start the recipe in a drill: how it leaves, at which step, and options of the command."""

    def start(drill, how, *options, env=None, rank=()):
        return drill.start(*options, recipe=recipes / "leaving.py", arguments=(how, "9", *rank), env=env)

    return start


@pytest.fixture
def nine(reference, recipes):
    """The digest of a run of nine steps that the recipe does not leave."""
    return reference("nine", recipe=recipes / "leaving.py", arguments=("nine", "9")).digest


def digest(drill):
    """Of the finished run; it is the same each time that the end is recorded."""
    (found,) = set(drill.values("run_finished", "digest"))
    return found[0]


def test_a_stopped_run_trains_nothing_more_and_says_so(drill, recipes, leave, nine):
    """It ran under plain python, so that no agent remembers the end, and the recipe would leave at
    step 12 now; or plain python again.
    """
    env = {"ELASTIC_RUN_DIR": drill.run.url}
    alone = drill.start_script(recipes / "leaving.py", "break", "9", env=env)
    alone.ends_with(0)
    assert LEFT in alone.output
    later = leave(drill, "break", env={"LEAVING_STEP": "12"})
    later.ends_with(0)
    assert f"is finished: it was {LEFT}" in later.output
    again = drill.start_script(recipes / "leaving.py", "break", "9", env=env | {"LEAVING_STEP": "12"})
    again.ends_with(0)
    assert f" was {LEFT}: no step is left" in again.output
    assert digest(drill) == nine
    assert drill.last_step == 9


def test_a_run_that_is_killed_around_its_early_end_ends_the_same(drill, leave, nine, tmp_path):
    """In step 7, in the step that it leaves, and after the loop, when its end is written down; each
    step is kept in memory. The next generation would leave at step 12.
    """
    plan = "step 7 rank 0: kill; step 9 rank 0 optimizer: kill"
    env = {"LEAVING_KILL": str(tmp_path / "killed")}
    options = ("--nproc-per-node", "2", "--snapshot-every", "1", "--faults", plan)
    leave(drill, "break", *options, env=env).ends_with(0)
    assert digest(drill) == nine
    assert len(drill.events("fault_injected")) == 2
    assert drill.last_step == 9
    assert [event["generation"] for event in drill.events("generation_started")] == [1, 2, 3, 4]


def test_a_rank_that_leaves_alone_ends_the_run_with_a_sentence(drill, leave):
    """It leaves in step 9, and the other one goes on into a sum that it will never join. Children
    that it forked in step 3 have ended the script, or left the loop.
    """
    agent = leave(drill, "fork", "--nproc-per-node", "2", "--max-restarts", "0", rank=("1",))
    agent.ends_with(2)
    assert "rank 1 left the loop in step 9" in agent.output
    assert "All ranks must leave it in the same step" in agent.output
    assert len(drill.events("generation_started")) == 1
    assert not any(drill.events(name) for name in ("hang_detected", "stopped", "run_finished"))
