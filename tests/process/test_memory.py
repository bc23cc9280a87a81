"""The state of the newest step outlives workers and nodes, and a changed state is never loaded."""

import os
import resource
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import run_records

from elastic.snapshot import checksum
from elastic.snapshot.slots import SnapshotSlots

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ALWAYS = ("--snapshot-every", "1")
# Only the first and the last step are saved: a restored state comes from memory.
MEMORY_ALONE = (*ALWAYS, "--save-every", "1000steps")


def restored(drill):
    return drill.values("restored", "step", "source", "lost_steps")


def memories_of(agent) -> list[SnapshotSlots]:
    """The agent's memories for snapshots, opened as its workers open them; each of them twice."""
    found = []
    for path in Path(f"/proc/{agent.pid}/fd").iterdir():
        # Another descriptor may be closed meanwhile, and the header not be written yet.
        with suppress(FileNotFoundError, ValueError):
            if "elastic-snapshots" in str(path.readlink()):
                found.append(SnapshotSlots.open(str(path)))
    return found


def slots_of(agent) -> SnapshotSlots:
    """Where the agent has one memory for snapshots."""
    return memories_of(agent)[0]


def test_a_killed_worker_costs_no_step_that_was_finished(drill, undisturbed):
    """SIGKILL of either rank at a gate, with no checkpoint at all: the state comes from the node's
    memory.
    """
    drill.shut(7, 15)
    agent = drill.start(*MEMORY_ALONE, "--nproc-per-node", "2", "--max-restarts", "1")
    for gate, rank, generation in ((7, 0, 1), (15, 1, 2)):
        drill.stands(gate, ranks=2)
        os.kill(drill.pid_of_rank(rank, generation=generation), signal.SIGKILL)
        drill.happens("restored", generation=generation + 1)
        drill.open(gate)
    agent.ends_with(0)

    drill.is_like(undisturbed)
    assert restored(drill) == [(0, "none", 0), (6, "snapshot", 0), (14, "snapshot", 0)]
    assert [e["step"] for e in drill.events("checkpoint_committed")] == [24]


def test_a_joining_node_gets_the_state_from_a_peer_and_survives_that_peer(drill, undisturbed):
    """There is no checkpoint to load.

    The first node, which has rank 0 and wrote the metrics, gets SIGKILL.
    """
    drill.shut(6, 13)
    first = drill.start(*MEMORY_ALONE, "--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")
    drill.stands(6, ranks=1)
    second = drill.start(*MEMORY_ALONE, "--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    drill.stands(13, ranks=2)
    first.signal(signal.SIGKILL)
    drill.happens("restored", generation=3)
    drill.open(13)
    second.ends_with(0)

    drill.is_like(undisturbed)
    assert restored(drill) == [(0, "none", 0), (6, "peer", 0), (12, "snapshot", 0)]


def test_a_snapshot_whose_bytes_changed_is_refused_and_the_one_before_is_used(drill, undisturbed):
    """One bit of the newest state is flipped in the agent's memory while the worker waits at a
    gate; then the worker dies.
    """
    drill.shut(7)
    agent = drill.start(*ALWAYS)
    drill.stands(7, ranks=1)
    slots = slots_of(agent)
    newest = slots.newest()
    slots.body(newest.slot)[newest.size_bytes // 2] ^= 16
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.happens("restored", generation=2)
    drill.open(7)
    agent.ends_with(0)

    drill.is_like(undisturbed)
    assert restored(drill) == [(0, "none", 0), (5, "snapshot", 1)]
    assert "snapshot step=6 is not used (its bytes changed in memory" in agent.output


def test_snapshots_that_disagree_are_refused_and_the_newest_that_nodes_share_is_used(drill, undisturbed):
    """One node's snapshot of step 6 is whole but different, and its workers voted for it, as a
    machine with faulty arithmetic would leave it that died before the ranks compared.
    """
    drill.shut(7)
    agents = drill.start_two(*ALWAYS, "--max-restarts", "1")
    drill.stands(7, ranks=2)
    drill.happens("checkpoint_committed", step=4)
    slots = slots_of(agents[1])
    newest = slots.newest()
    slot = slots.begin()
    slots.body(slot)[: newest.size_bytes] = slots.body(newest.slot)[: newest.size_bytes]
    slots.body(slot)[newest.size_bytes - 1] ^= 1
    changed = checksum.of_image(slots.body(slot)[: newest.size_bytes])
    other = slots.publish(slot, size_bytes=newest.size_bytes, info=replace(newest.info, checksum=changed))
    slots.agree(slot, other.seq)
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.happens("restored", generation=2)
    drill.open(7)
    for agent in agents:
        agent.ends_with(0)

    drill.is_like(undisturbed)
    assert restored(drill) == [(0, "none", 0), (5, "snapshot", 1)]
    (rejected,) = drill.events("snapshot_rejected")
    assert rejected["step"] == 6
    assert "differ" in rejected["reason"]


def test_a_node_with_memory_for_one_copy_of_the_state_makes_checkpoints(drill, undisturbed):
    """No file of the agent may be larger than 2 MiB, nor its memory for snapshots."""
    drill.shut(1, 3, 5)
    agent = drill.start(*ALWAYS)
    drill.stands(1, ranks=1)
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (2**21, 2**21))
    drill.open(1)
    drill.stands(3, ranks=1)
    said = "no memory for 3 snapshots of 1 MB; there is one"
    drill.waits_for(lambda: said in agent.output, said)
    drill.open(3)
    drill.stands(5, ranks=1)  # the copy of step 5 would take the place of that of step 4
    drill.happens("checkpoint_committed", step=4)
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.happens("restored", generation=2)
    drill.open(5)
    agent.ends_with(0)

    drill.is_like(undisturbed)


def test_training_goes_on_while_memory_for_a_large_state_is_made_ready(drill):
    """No copy of its first step is waited for; the steps after that are in memory, and saved."""
    drill.shut(2, 4)
    agent = drill.start(*ALWAYS, "--save-every", "1steps", env={"TINY_LARGE": "70"})
    drill.stands(2, ranks=1)
    drill.waits_for(lambda: [each for each in memories_of(agent) if each.num_prepared == 3], "three slots")
    assert slots_of(agent).newest() is None
    assert not drill.events("checkpoint_committed")
    drill.open(2)
    drill.stands(4, ranks=1)
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.happens("restored", generation=2)
    drill.open(4)
    agent.ends_with(0)

    assert "is not saved" not in agent.output
    assert restored(drill) == [(0, "none", 0), (3, "snapshot", 0)]


def test_a_state_that_outgrows_its_slots_keeps_its_newest_snapshot(drill, undisturbed):
    """After step 8 the state has no room in its slots. The agent has made larger ones, in which
    there is nothing yet, when a worker dies.
    """
    drill.shut(9)
    agent = drill.start(*MEMORY_ALONE, "--nproc-per-node", "2", env={"TINY_GROW": "8"})
    drill.stands(9, ranks=2)
    drill.waits_for(lambda: any(each.capacity_bytes > 2**21 for each in memories_of(agent)), "larger slots")
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.happens("restored", generation=2)
    drill.open(9)
    agent.ends_with(0)

    assert restored(drill) == [(0, "none", 0), (7, "snapshot", 1)]
    lines = run_records.lines(drill.run.metrics)
    assert [line["chain"] for line in lines] == undisturbed.chains


def test_a_state_without_progress_gives_way_to_an_older_one(drill):
    """The recipe raises in step 10 from any state: three times from step 9 in memory, and then from
    the checkpoint of step 8. Then no state is to blame, and the run fails with restarts left.
    """
    drill.shut(5, 9)
    agent = drill.start(*ALWAYS, "--max-restarts", "5", env={"TINY_RAISE": "10 0"})
    for gate in (5, 9):
        drill.happens("checkpoint_committed", step=gate - 1)
        drill.open(gate)
    agent.ends_with(1)

    assert [e["step"] for e in drill.events("restored")] == [0, 9, 9, 9, 8]
    assert [e["step"] for e in drill.events("snapshot_rejected")] == [9]
    assert "the same error came back in step 10 after a restart from step 8" in agent.output
    assert "the recipe's own mistake" in agent.output.splitlines()[-1]


def test_a_step_that_only_another_node_wrote_down_leaves_no_hole_in_the_metrics(drill, undisturbed):
    """Rank 0 dies between step 9's sums and its line of the metrics.

    The other node finishes the step: its agent is held (SIGSTOP) until its worker waits before step
    10.
    """
    drill.shut(9, 10)
    options = ("--keep-alive", "10min", "--faults", "step 9 rank 0 optimizer: kill")
    agents = drill.start_two(*MEMORY_ALONE, "--max-restarts", "1", *options)
    drill.stands(9, ranks=2)
    _, other = drill.agents_of_ranks_0_and_1()
    other.signal(signal.SIGSTOP)
    drill.open(9)
    drill.waits_for((drill.gates / "at-10-rank1").exists, "rank 1 before step 10")
    other.signal(signal.SIGCONT)
    drill.happens("restored", generation=2)
    drill.open(10)
    for agent in agents:
        agent.ends_with(0)

    drill.is_like(undisturbed)
    assert restored(drill) == [(0, "none", 0), (9, "peer", 0)]
