"""A stop ends in bounded time, and its exit code says whether the newest state is committed."""

import os
import re
import resource
import signal
from pathlib import Path

import pytest

from elastic.system import interrupt

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ALWAYS = ("--snapshot-every", "1")
# No save becomes due by itself: what is committed in these tests was committed because of the stop.
MEMORY_ALONE = (*ALWAYS, "--save-every", "1000steps")


def test_a_node_told_to_leave_before_it_is_ready_can_start_again(drill, undisturbed):
    """It watches the place of nodes that died elsewhere. The signal ended it without a word,
    and its uploader with a traceback.
    """
    drill.shut(10)
    first = drill.start("--rdzv-endpoint", str(drill.folder / "elsewhere"))
    drill.stands(10, ranks=1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = drill.start()
    drill.waits_for(lambda: "watching for" in second.output, "it watches the other place")
    second.signal(signal.SIGTERM)
    second.ends_with(75)
    assert second.output.splitlines()[-1] == interrupt.SENTENCE
    assert "Traceback" not in second.output
    drill.all_are_gone()
    drill.open(10)
    drill.ends_like(undisturbed, drill.start())


def test_the_first_step_is_finished_and_saved(drill, undisturbed):
    """It had begun, and its line of the metrics may have been written. Both nodes are told."""
    drill.shut(1)
    agents = drill.start_two(*MEMORY_ALONE)
    drill.stands(1, ranks=2)
    for agent in agents:
        agent.signal(signal.SIGTERM)
    drill.waits_for(lambda: len(drill.events("drain_requested")) == 2, "both drain")
    drill.open(1)
    for agent in agents:
        agent.ends_with(75)
        assert "step 1 is saved" in agent.output.splitlines()[-1]
    drill.ends_like(undisturbed, *drill.start_two(*MEMORY_ALONE))
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (1, 0)]


def test_workers_that_do_not_drain_are_killed_and_committed(drill, undisturbed):
    """A worker is held in step 10, and never sees the request."""
    drill.shut(10)
    agent = drill.start(*MEMORY_ALONE, "--grace", "10s")
    drill.stands(10, ranks=1)
    agent.signal(signal.SIGTERM)
    agent.ends_with(75)
    assert "step 9 is saved" in agent.output.splitlines()[-1]
    assert drill.is_committed(9)
    drill.all_are_gone()

    drill.open(10)
    drill.ends_like(undisturbed, drill.start(*MEMORY_ALONE))
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (9, 0)]


@pytest.mark.parametrize("leavers", [1, 2])
def test_steps_in_no_snapshot_are_redone_before_a_node_leaves(leavers, drill, undisturbed):
    """Two nodes stand in an evaluation after step 8, for longer than half of the grace; the newest
    snapshot is of step 5. One of them leaves, or both.
    """
    rare = ("--save-every", "1000steps", "--snapshot-every", "4steps", "--grace", "16s")
    env = {"TINY_EVALUATE": "1"}
    drill.shut("evaluation-8")
    agents = drill.start_two(*rare, env=env)
    drill.stands("evaluation-8", ranks=1)
    leaving = agents if leavers == 2 else [drill.agent_of_rank(0, generation=1)]
    for agent in leaving:
        agent.signal(signal.SIGTERM)
    for agent in leaving:
        agent.ends_with(75)
        assert "the steps from 6 to 7 are in no snapshot" in agent.output
        assert "step 7 is saved" in agent.output.splitlines()[-1]
    drill.open("evaluation-8")
    others = [agent for agent in agents if agent not in leaving] or [drill.start(*rare, env=env)]
    drill.ends_like(undisturbed, others[0])
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (5, 2), (7, 0)]


def test_a_node_that_waits_for_others_saves_before_it_leaves(drill, undisturbed):
    """The other of two nodes dies (SIGKILL), and the group needs two: the one that is left waits,
    and is told to leave.
    """
    group = (*MEMORY_ALONE, "--min-nodes", "2", "--max-restarts", "0")
    drill.shut(10)
    agents = drill.start_two(*group)
    drill.stands(10, ranks=2)
    agents[0].signal(signal.SIGKILL)
    drill.waits_for(lambda: "generation 2 waits for nodes" in agents[1].output, "it waits for another")
    agents[1].signal(signal.SIGTERM)
    agents[1].ends_with(75)
    assert "step 9 is saved" in agents[1].output.splitlines()[-1]
    assert drill.is_committed(9)

    drill.open(10)
    drill.ends_like(undisturbed, *drill.start_two(*group))


def test_a_grace_shorter_than_a_save_ends_at_the_safe_step(drill, undisturbed):
    """The uploader is stopped (SIGSTOP) after step 8 is committed, so that no save ends."""
    drill.shut(5, 10)
    agent = drill.start(*ALWAYS, "--grace", "10s")
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(10, ranks=1)
    drill.happens("checkpoint_committed", step=8)
    os.kill(drill.uploader_of(agent), signal.SIGSTOP)
    agent.signal(signal.SIGTERM)
    drill.happens("drain_requested")
    drill.open(10)
    agent.ends_with(1)
    assert "after step 10, but step 8 is the newest that is saved" in agent.output
    drill.all_are_gone()

    drill.ends_like(undisturbed, drill.start(*ALWAYS))


def test_a_step_that_a_restore_gave_up_is_not_waited_for(drill, undisturbed):
    """Step 9 was lost with its worker; the signal comes after the restore of step 8."""
    drill.shut(5, 10)
    agent = drill.start("--snapshot-every", "off", "--grace", "10s")
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(10, ranks=1)
    drill.happens("checkpoint_committed", step=8)
    drill.shut(9)
    drill.kill_worker(0, generation=1)
    drill.stands(9, ranks=1)
    agent.signal(signal.SIGTERM)
    agent.ends_with(75)
    assert "step 8 is saved" in agent.output.splitlines()[-1]
    drill.all_are_gone()

    drill.open(9)
    drill.open(10)
    drill.ends_like(undisturbed, drill.start())


def test_a_signal_to_all_processes_lets_the_step_load_its_data(drill, recipes):
    """It goes to agent, fork server, worker, uploader and data-loading process alike. The recipe
    has a handler of its own. The worker waits for the data loader, which is held at a gate.
    """
    drill.shut(7)
    recipe = recipes / "loading.py"
    agent = drill.start(*MEMORY_ALONE, recipe=recipe)
    drill.waits_for((drill.gates / "loading").exists, "a sample that is being loaded")
    for pid in drill.alive():
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGUSR1)
    drill.happens("drain_requested", reason="SIGUSR1 asks this node to leave")
    handled = drill.gates / f"handled-{drill.pid_of_rank(0, generation=1)}"
    drill.waits_for(handled.exists, "the recipe's own handler")
    (drill.gates / "load").touch()
    agent.ends_with(75)
    assert "grace" not in agent.output
    (drained,) = drill.events("drained")
    assert drill.is_committed(drained["step"])
    restarted = drill.start(*MEMORY_ALONE, recipe=recipe)
    restarted.ends_with(0)
    assert "Traceback" not in restarted.output  # the end of a loading process is no error
    assert [e["lost_steps"] for e in drill.events("restored")] == [0, 0]


def test_the_node_that_stays_commits_the_leavers_last_step(drill, undisturbed):
    """The node of rank 0 leaves, and exits only when a checkpoint holds the last step.

    Its agent gets SIGTERM from the plan of faults.
    """
    drill.shut(6)
    drill.start_two(*MEMORY_ALONE, "--max-restarts", "0", "--faults", "step 5 node 0: terminate")
    drill.stands(6, ranks=2)
    leaver, other = drill.agents_of_ranks_0_and_1()
    drill.happens("drain_requested")
    drill.open(6)
    leaver.ends_with(75)
    assert drill.is_committed(6)
    drill.ends_like(undisturbed, other)
    assert drill.values("restored", "step", "source") == [(0, "none"), (6, "snapshot")]


def test_a_leaving_node_waits_for_the_save_that_fences_its_own(drill, undisturbed):
    """The node of rank 0 leaves. The uploader of the other one stands still (SIGSTOP) until half of
    the grace is over, and the leaver has tried to save the state that both have.
    """
    drill.shut(6, 8)
    drill.start_two(*MEMORY_ALONE, "--max-restarts", "0", "--grace", "14s")
    drill.stands(6, ranks=2)
    leaver, other = drill.agents_of_ranks_0_and_1()
    drill.uploader_serves(other)
    uploader = drill.uploader_of(other)
    os.kill(uploader, signal.SIGSTOP)
    leaver.signal(signal.SIGTERM)
    drill.happens("drain_requested")
    drill.open(6)
    drill.happens("checkpoint_fenced", step=6, generation=1)
    os.kill(uploader, signal.SIGCONT)
    leaver.ends_with(75)
    # The other may have committed a later step before the leaver says what is the newest.
    saved = re.search(r"step (\d+) is saved", leaver.output.splitlines()[-1])
    assert saved is not None and 6 <= int(saved[1]) <= 8
    drill.open(8)
    drill.ends_like(undisturbed, other)


def test_a_node_leaves_no_step_to_nodes_without_memory_for_it(drill, undisturbed):
    """No file of the agent that stays may be larger than 512 KiB, nor its memory for snapshots,
    while a state has 1 MB. So the leaver commits the newest state before the other goes on. A
    second signal kills its worker in step 6.
    """
    drill.shut(1, 6)
    drill.start_two(*MEMORY_ALONE, "--max-restarts", "0")
    drill.stands(1, ranks=2)
    leaver, other = drill.agents_of_ranks_0_and_1()
    resource.prlimit(other.pid, resource.RLIMIT_FSIZE, (2**19, resource.RLIM_INFINITY))
    drill.open(1)
    drill.waits_for(lambda: "no memory for one copy of the state" in other.output, "the refusal")
    drill.stands(6, ranks=2)
    resource.prlimit(other.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for _ in range(2):
        leaver.signal(signal.SIGTERM)
        drill.happens("drain_requested")
    leaver.ends_with(75)
    assert "step 5 is saved" in leaver.output.splitlines()[-1]
    drill.open(6)
    drill.ends_like(undisturbed, other)
    assert drill.values("restored", "step", "source", "lost_steps") == [(0, "none", 0), (5, "checkpoint", 0)]


def test_a_node_that_only_restored_a_state_loses_none(drill, undisturbed):
    """It joined after step 6, has the state of that step from the other, and none in its memory.
    The other's uploader stands still (SIGSTOP), so that no checkpoint holds the step.
    """
    drill.shut(6, 7)
    options = (*MEMORY_ALONE, "--max-nodes", "2", "--max-restarts", "0")
    first = drill.start(*options)
    drill.stands(6, ranks=1)
    drill.uploader_serves(first)
    uploader = drill.uploader_of(first)
    os.kill(uploader, signal.SIGSTOP)
    joined = drill.start(*options)
    drill.happens("drain_requested", generation=1)
    drill.open(6)
    drill.stands(7, ranks=2)
    for _ in range(2):
        joined.signal(signal.SIGTERM)
        drill.happens("drain_requested", generation=2)
    joined.wait()
    os.kill(uploader, signal.SIGCONT)
    joined.ends_with(75)
    said = joined.output.splitlines()[-1]
    assert said.endswith("before it trained a step; the other nodes go on, and no step is saved yet")
    drill.open(7)
    drill.ends_like(undisturbed, first)
    assert {lost for (lost,) in drill.values("restored", "lost_steps")} == {0}
