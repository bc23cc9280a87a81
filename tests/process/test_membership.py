"""A node that joins, leaves or dies changes the world size, and nothing else."""

import json
import os
import shutil
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

GROUP = ("--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")


def test_a_second_terminal_joins_and_leaves_and_no_step_is_lost(drill, undisturbed):
    """No restart is allowed, so a change of membership that counted as one would end the run."""
    drill.shut(6, 13)
    first = drill.start(*GROUP)
    drill.stands(6, ranks=1)
    second = drill.start(*GROUP, "--nproc-per-node", "2")
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    drill.drains(second, 13, ranks=3)
    drill.ends_like(undisturbed, first)
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(1, "start", 0), (3, "node joined", 0), (1, "node left", 0)]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (6, 0), (13, 0)]


def test_the_node_of_rank_0_dies_and_the_other_goes_on(drill, undisturbed):
    """By a plan, once its worker has finished step 9: agent, worker, fork server and uploader are
    gone at once, and with them the generation's store. Only its silence tells.
    """
    drill.shut(10)
    plan = "step 9 node 0: kill"
    drill.start_two("--max-restarts", "0", "--snapshot-every", "1", "--faults", plan)
    doomed, other = drill.agents_of_ranks_0_and_1()
    doomed.ends_with(-signal.SIGKILL)
    drill.waits_for(
        lambda: set(drill.alive()) == set(drill.processes_of(other)), "the end of all processes of the node"
    )
    drill.open(10)
    drill.ends_like(undisturbed, other)
    assert [e["step"] for e in drill.events("fault_injected")] == [9]
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(2, "start", 0), (1, "node lost", 0)]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (9, 0)]


def test_a_frozen_node_is_evicted_and_joins_again_when_it_wakes(drill, undisturbed):
    """The node of rank 0 stops with all its processes, as a paused container. The other node trains
    alone and admits it again.
    """
    drill.shut(10)
    agents = drill.start_two("--max-restarts", "0", "--snapshot-every", "1")
    drill.stands(10, ranks=2)
    frozen, _ = drill.agents_of_ranks_0_and_1()
    asleep = drill.processes_of(frozen)
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    drill.happens("restored", generation=2, step=9, lost_steps=0)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    drill.happens("drain_requested", generation=2, reason="a node is waiting to join")
    drill.open(10)
    drill.ends_like(undisturbed, *agents)
    generations = drill.values("generation_started", "world_size", "cause")
    assert generations == [(2, "start"), (1, "node lost"), (2, "node joined")]
    assert all(lost == 0 for (lost,) in drill.values("restored", "lost_steps"))
    assert "a newer generation exists, and this node is not in it" in frozen.output


def test_a_rendezvous_folder_emptied_in_training_is_restored(drill, undisturbed):
    """In step 10 the files are removed, and then the folder with them. A node that comes afterwards
    still finds the group.
    """

    def is_restored():
        drill.waits_for(lambda: list(drill.run.rendezvous.glob("state-*")), "the group's state")

    drill.shut(10)
    first = drill.start(*GROUP)
    drill.stands(10, ranks=1)
    for path in drill.run.rendezvous.iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    is_restored()
    # In one operation: a live node writes into it all the time.
    drill.run.rendezvous.rename(drill.folder / "removed")
    is_restored()
    second = drill.start(*GROUP)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(10)
    drill.ends_like(undisturbed, first, second)
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(1, "start", 0), (2, "node joined", 0)]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (10, 0)]


def test_a_moved_run_directory_stops_nothing(drill, undisturbed):
    """It is renamed in step 6, and the last state is saved under the old name."""
    drill.shut(6)
    agent = drill.start(*GROUP)
    drill.stands(6, ranks=1)
    drill.run.local.rename(drill.folder / "moved")
    drill.open(6)
    agent.ends_with(0)
    code, found = drill.inspects("verify", drill.run.url)
    assert code == 0 and found["damage"] == []
    record = json.loads(max(drill.run.local.glob("checkpoints/*/COMMIT.json")).read_bytes())
    assert (record["step"], record["digest"]) == (24, undisturbed.digest)
