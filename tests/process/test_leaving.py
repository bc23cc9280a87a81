"""A recipe that leaves its loop early ends the run there, with the state of that step."""

import os
import shutil
import signal
import sys
from contextlib import suppress

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

LEFT = "stopped by the recipe after step 9 of 18 (the recipe left the loop)"


@pytest.fixture
def leave(recipes):
    """Start the recipe in a drill: how it leaves, at which step, and options of the command."""

    def start(drill, how, *options, step="9", env=None, rank=()):
        return drill.start(*options, recipe=recipes / "leaving.py", arguments=(how, step, *rank), env=env)

    return start


def digest(drill):
    """Of the finished run; it is the same each time that the end is recorded."""
    (found,) = set(drill.values("run_finished", "digest"))
    return found[0]


def test_every_way_out_of_the_loop_ends_with_the_state_of_that_step(drills, tmp_path, leave, nine):
    """At one and two workers, with saves at other steps than the last one.

    After the loop the recipe changes its weights, as one does that loads its best ones.
    """
    ways = [
        ("break", "1", "1steps"),
        ("break", "2", "3steps"),
        ("return", "1", "auto"),
        ("stop", "2", "auto"),
        ("exit", "2", "4steps"),
        ("catch", "1", "4steps"),
        ("held", "1", "auto"),
    ]
    started = []
    for number, (how, workers, every) in enumerate(ways):
        drill = drills(tmp_path / str(number))
        agent = leave(drill, how, "--nproc-per-node", workers, "--save-every", every)
        started.append((how, drill, agent))
    for how, drill, agent in started:
        agent.ends_with(0)
        assert digest(drill) == nine, how
        reason = "enough" if how == "stop" else "the recipe left the loop"
        assert drill.values("stopped", "step", "steps", "reason") == [(9, 18, reason)]
        assert f"stopped by the recipe after step 9 of 18 ({reason})" in agent.output.splitlines()[-1]
        report = drill.inspects("report", drill.run.url)[1]
        assert (report["finished"], report["steps"], report["final_digest"]) == (True, 9, nine)
        assert report["stopped"] == {"step": 9, "steps": 18, "reason": reason}
        status = drill.inspects("status", drill.run.url)[1]
        assert (status["state"], status["step"], status["steps"]) == ("finished", 9, 18)
        assert drill.last_step == 9


def test_a_stopped_run_trains_nothing_more_and_says_so(drill, leave, nine):
    """The same command again; then without its rendezvous folder, so that no agent remembers the
    end. The recipe would leave at step 12 now: it decides by something that is not in its state.
    """
    leave(drill, "break").ends_with(0)
    again = leave(drill, "break")
    again.ends_with(0)
    assert f"is finished: it was {LEFT}" in again.output
    assert "--from" in again.output
    shutil.rmtree(drill.run.rendezvous)
    later = leave(drill, "break", env={"LEAVING_STEP": "12"})
    later.ends_with(0)
    assert f"this run was {LEFT}: no step is left" in later.output
    assert LEFT in later.output.splitlines()[-1]
    assert digest(drill) == nine
    assert drill.last_step == 9


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_that_is_killed_around_its_early_end_ends_the_same(drill, leave, nine, workers, tmp_path):
    """In step 7, in the step that it leaves, and after the loop, when its end is written down; each
    step is kept in memory. The next generation would leave at step 12.
    """
    plan = "step 7 rank 0: kill; step 9 rank 0 optimizer: kill"
    env = {"LEAVING_KILL": str(tmp_path / "killed")}
    options = ("--nproc-per-node", workers, "--snapshot-every", "1", "--faults", plan)
    leave(drill, "break", *options, env=env).ends_with(0)
    assert digest(drill) == nine
    assert len(drill.events("fault_injected")) == 2
    assert drill.last_step == 9
    assert [event["generation"] for event in drill.events("generation_started")] == [1, 2, 3, 4]


def test_a_step_that_is_left_before_its_gradients_has_not_begun(drills, tmp_path, leave):
    """Whatever was saved, and also if the recipe was killed in the step before."""
    plan = ("--faults", "step 8 rank 1: kill", "--nproc-per-node", "2")
    options = [("--save-every", "1steps"), ("--save-every", "3steps", "--nproc-per-node", "2"), plan]
    started = []
    for number, each in enumerate(options):
        drill = drills(tmp_path / str(number))
        started.append((drill, leave(drill, "before", *each)))
    for drill, agent in started:
        agent.ends_with(0)
        assert "stopped by the recipe after step 8 of 18" in agent.output.splitlines()[-1]
        assert drill.last_step == 8
    assert len({digest(drill) for drill, _ in started}) == 1


@pytest.mark.parametrize("options", [("--snapshot-every", "off"), ("--snapshot-every", "1")])
def test_a_state_that_was_changed_before_the_loop_was_left_is_refused_at_every_rhythm(drill, leave, options):
    """With a copy of the state at step 8 it can be compared; without one its mark tells."""
    agent = leave(drill, "spoil", "--save-every", "1000steps", *options)
    agent.ends_with(2)
    assert "left the loop in step 9 before its gradients, and had changed the state in it" in agent.output
    assert not drill.events("stopped")


@pytest.mark.parametrize(("how", "rank"), [("break", 1), ("break", 0), ("before", 1), ("fork", 1)])
def test_a_rank_that_leaves_alone_ends_the_run_with_a_sentence(drill, leave, how, rank):
    """It leaves in step 9, and the other one goes on into a sum that it will never join. Rank 0
    serves the store in which the other one reads why.

    With `fork` a child of rank 1 lives on, which was forked while its connections were open.
    """
    agent = leave(drill, how, "--nproc-per-node", "2", rank=(str(rank),))
    agent.ends_with(2)
    assert f"rank {rank} left the loop in step 9" in agent.output
    assert "All ranks must leave it in the same step" in agent.output
    assert len(drill.events("generation_started")) == 1
    assert not drill.events("stopped")
    assert not drill.events("hang_detected")


def test_a_break_before_the_update_of_the_last_step_is_said(drill, leave):
    """It was "complete", with weights that lack the last update."""
    agent = leave(drill, "cut", "--nproc-per-node", "2", step="18")
    agent.ends_with(0)
    reason = "the recipe left the loop, with unused gradients"
    assert f"stopped by the recipe after step 18 of 18 ({reason})" in agent.output.splitlines()[-1]
    assert drill.values("stopped", "step", "steps", "reason") == [(18, 18, reason)]


def test_an_exit_code_in_the_loop_is_a_failure(drill, leave):
    """`sys.exit(3)`: nothing is known of why, so the run is not stopped. The report has the words
    of `sys.exit("text")`.
    """
    agent = leave(drill, "exit-3", "--max-restarts", "0")
    agent.ends_with(1)
    assert not drill.events("stopped")
    assert drill.inspects("report", drill.run.url)[1]["finished"] is False
    leave(drill, "exit-text", "--fresh", "--max-restarts", "0").ends_with(1)
    failed = drill.inspects("report", drill.run.url)[1]["failed"]
    assert failed["reason"].startswith("rank 0 ended with exit code 1 (the loss is not a number); that was")


def test_a_worker_that_is_gone_with_exit_code_0_within_its_loop_has_failed(drills, tmp_path, leave):
    """`os._exit(0)` in step 9, as a C library may call it: no Python code of the worker follows.

    With two workers only rank 1 is gone, and rank 0 has a traceback of the sum that broke.
    """
    gone = "ended with exit code 0 within the loop, in step 9"
    alone, pair, plain = (drills(tmp_path / name) for name in ("alone", "pair", "plain"))
    first = leave(alone, "gone", "--max-restarts", "1")
    second = leave(pair, "gone", "--max-restarts", "0", "--nproc-per-node", "2", rank=("1",))
    script = plain.folder / "script.py"
    script.write_text("import os\nos._exit(0)\n")
    third = plain.start(recipe=script)
    for drill, agent, rank in (alone, first, 0), (pair, second, 1):
        agent.ends_with(1)
        assert f"training failed: rank {rank} {gone}" in agent.output
        assert "use break or run.stop(reason)" in agent.output
        assert f"first failing worker: rank {rank} on" in agent.output
        assert set(drill.values("worker_failed", "rank")) == {(rank,)}
        assert not drill.events("run_finished")
    leave(alone, "gone", env={"LEAVING_STEP": "99"}).ends_with(0)
    assert alone.last_step == 18
    third.ends_with(0)


def test_a_child_that_a_worker_forks_is_no_part_of_the_run(drills, tmp_path, recipes, leave, nine):
    """Each worker forks children that exit, fail, break out of the loop, or go on with it, and ends
    one by SIGTERM, whose handler and control page are those of the worker. One child lives on.

    Under elastic-train, plain python and torchrun.
    """
    pair, alone, torch = (drills(tmp_path / name) for name in ("pair", "alone", "torch"))
    env = {drill: {"ELASTIC_RUN_DIR": drill.run.url} for drill in (alone, torch)}
    words = str(recipes / "leaving.py"), "fork", "9"
    agent = leave(pair, "fork", "--nproc-per-node", "2")
    script = alone.start_script(recipes / "leaving.py", "fork", "9", env=env[alone])
    torchrun = torch.start_torchrun("--standalone", "--nproc-per-node", "2", *words, env=env[torch])
    for drill, process in (pair, agent), (alone, script), (torch, torchrun):
        process.ends_with(0)
        assert digest(drill) == nine
        assert drill.last_step == 9
    assert not pair.events("worker_failed")
    assert len(pair.events("generation_started")) == 1
    assert "found them in a child that the recipe forked" in script.output
    for pid in (*alone.alive(), *torch.alive()):  # without an agent nothing ends the child that lives on
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_ends_are_the_same_without_an_agent(drills, tmp_path, recipes, nine):
    """`python recipe.py`, left and left again, or ended in failure; torchrun with two workers."""
    recipe = str(recipes / "leaving.py")
    alone, failing, several = (drills(tmp_path / name) for name in ("alone", "failing", "several"))
    env = {drill: {"ELASTIC_RUN_DIR": drill.run.url} for drill in (alone, failing, several)}
    words = ("--standalone", "--nproc-per-node", "2", recipe, "break", "9")
    torchrun = several.start_torchrun(*words, env=env[several])
    exits = alone.execute([sys.executable, recipe, "exit", "9"], env[alone])
    failing.execute([sys.executable, recipe, "exit-3", "9"], env[failing]).ends_with(3)
    assert not failing.events("run_finished")
    exits.ends_with(0)
    assert LEFT in exits.output
    again = alone.start_script(recipes / "leaving.py", "exit", "9", env=env[alone])
    again.ends_with(0)
    assert f"this run was {LEFT}: no step is left" in again.output
    torchrun.ends_with(0)
    assert digest(alone) == digest(several) == nine
