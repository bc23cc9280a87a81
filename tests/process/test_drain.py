"""A stop ends in bounded time, and its exit code says whether the newest state is committed."""

import os
import signal
from pathlib import Path

# No save becomes due by itself: what is committed in these tests was committed because of the stop.
MEMORY_ALONE = ("--snapshot-every", "1", "--save-every", "1000steps")


def test_workers_that_do_not_drain_are_killed_and_committed(drill, undisturbed):
    """A worker stands in an evaluation for longer than half of the grace, and never sees the
    request. The step before it has a snapshot, as in each epoch.
    """
    command, env = ("--save-every", "1000steps", "--grace", "8s"), {"TINY_EVALUATE": "1"}
    agent = drill.start_before("evaluation-8", *command, env=env)
    agent.signal(signal.SIGTERM)
    agent.ends_with(75)
    assert "step 7 is saved" in agent.output.splitlines()[-1]
    assert drill.is_committed(7)
    drill.all_are_gone()

    drill.open("evaluation-8")
    drill.ends_like(undisturbed, drill.start(*command, env=env))
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (7, 0)]


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
    drill.ends_like(undisturbed, drill.start(*MEMORY_ALONE))


def test_a_signal_to_all_processes_lets_the_step_load_its_data(drill, recipes):
    """It goes to agent, fork server, worker, uploader and data-loading process alike. The recipe
    has a handler of its own. The worker waits for the data loader, which is held at a gate.
    """
    drill.shut("sample")
    recipe = recipes / "loading.py"
    agent = drill.start(*MEMORY_ALONE, recipe=recipe)
    drill.stands("sample", ranks=1)
    for pid in drill.alive():
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGUSR1)
    drill.happens("drain_requested", reason="SIGUSR1 asks this node to leave")
    handled = drill.gates / f"handled-{drill.pid_of_rank(0, generation=1)}"
    drill.waits_for(handled.exists, "the recipe's own handler")
    drill.open("sample")
    agent.ends_with(75)
    assert "grace" not in agent.output
    (drained,) = drill.events("drained")
    assert drill.is_committed(drained["step"])
    restarted = drill.start(*MEMORY_ALONE, recipe=recipe)
    restarted.ends_with(0)
    assert "Traceback" not in restarted.output  # the end of a loading process is no error
    assert [e["lost_steps"] for e in drill.events("restored")] == [0, 0]
