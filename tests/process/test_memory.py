"""The state of the newest step outlives workers and nodes, and a changed state is never loaded."""

import signal
from contextlib import suppress
from pathlib import Path

import pytest

from elastic.snapshot.slots import SnapshotSlots

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ALWAYS = ("--snapshot-every", "1")
# Only the first and the last step are saved: a restored state comes from memory.
MEMORY_ALONE = (*ALWAYS, "--save-every", "1000steps")


def restored(drill):
    return drill.values("restored", "step", "source", "lost_steps")


def slots_of(agent) -> SnapshotSlots:
    """The agent's memory for snapshots, opened as its workers open it."""
    for path in Path(f"/proc/{agent.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # another descriptor may be closed meanwhile
            if "elastic-snapshots" in str(path.readlink()):
                return SnapshotSlots.open(str(path))
    raise LookupError


def test_a_killed_worker_costs_no_step_that_was_finished(drill, undisturbed):
    """SIGKILL of a rank at a gate, and later of both, so that the votes on step 14 were never
    exchanged. There is no checkpoint: the state comes from the node's memory.
    """
    drill.shut(7, 15)
    agent = drill.start(*MEMORY_ALONE, "--nproc-per-node", "2", "--max-restarts", "1")
    for gate, ranks, generation in ((7, [0], 1), (15, [0, 1], 2)):
        drill.stands(gate, ranks=2)
        for rank in ranks:
            drill.kill_worker(rank, generation)
        drill.happens("restored", generation=generation + 1)
        drill.open(gate)
    drill.ends_like(undisturbed, agent)
    assert restored(drill) == [(0, "none", 0), (6, "snapshot", 0), (14, "snapshot", 0)]
    assert [e["step"] for e in drill.events("checkpoint_committed")] == [24]


def test_a_joining_node_gets_the_state_and_survives_its_source(drill, undisturbed):
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
    drill.ends_like(undisturbed, second)
    assert restored(drill) == [(0, "none", 0), (6, "peer", 0), (12, "snapshot", 0)]


def test_a_changed_snapshot_is_refused_the_one_before_is_used(drill, undisturbed):
    """One bit of the newest state is flipped in the agent's memory while the worker waits at a
    gate; then the worker dies.
    """
    drill.shut(7)
    agent = drill.start(*ALWAYS)
    drill.stands(7, ranks=1)
    slots = slots_of(agent)
    newest = slots.whole()[0]
    slots.body(newest.slot)[newest.size_bytes // 2] ^= 16
    drill.kill_worker(0, generation=1)
    drill.happens("restored", generation=2)
    drill.open(7)
    drill.ends_like(undisturbed, agent)
    assert restored(drill) == [(0, "none", 0), (5, "snapshot", 1)]
    assert "snapshot step=6 is not used (its bytes changed in memory" in agent.output


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
