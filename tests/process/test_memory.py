"""The state of the newest step outlives workers and nodes, and a changed state is never loaded."""

import signal

# Only the first and the last step are saved: a restored state comes from memory.
MEMORY_ALONE = ("--snapshot-every", "1", "--save-every", "1000steps")


def restored(drill):
    return drill.values("restored", "step", "source", "lost_steps")


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
    """There is no checkpoint to load. The first node, which has rank 0 and wrote the metrics, is
    killed by a plan: agent, worker, fork server and uploader are gone at once, and with them the
    generation's store. Only its silence tells.
    """
    group = (*MEMORY_ALONE, "--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")
    drill.shut(13)
    first = drill.start_before(6, *group, "--faults", "step 12 node 0: kill")
    second = drill.start(*group)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    first.ends_with(-signal.SIGKILL)
    drill.waits_for(
        lambda: set(drill.alive()) == set(drill.processes_of(second)), "the end of all processes of the node"
    )
    drill.happens("restored", generation=3)
    drill.open(13)
    drill.ends_like(undisturbed, second)
    causes = drill.values("generation_started", "world_size", "cause", "restarts")
    assert causes == [(1, "start", 0), (2, "node joined", 0), (1, "node lost", 0)]
    assert restored(drill) == [(0, "none", 0), (6, "peer", 0), (12, "snapshot", 0)]
