"""Agents that share a run directory are one group: who comes, leaves or dies changes the number of workers and nothing else."""

import os
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

GROUP = ("--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")


def test_a_second_terminal_joins_and_leaves_and_no_step_is_lost(drill, undisturbed):
    """Not one restart is allowed, so a change of membership that counted as one would end the run. The second node brings two workers."""
    drill.shut(6, 13)
    first = drill.start(*GROUP)
    drill.stands(6, ranks=1)
    second = drill.start(*GROUP, "--nproc-per-node", "2")
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    drill.stands(13, ranks=3)
    second.signal(signal.SIGTERM)
    drill.happens("drain_requested", generation=2)
    drill.open(13)
    second.ends_with(75)
    first.ends_with(0)

    drill.is_like(undisturbed)
    generations = [(e["world_size"], e["cause"], e["restarts"]) for e in drill.events("generation_started")]
    assert generations == [(1, "start", 0), (3, "node joined", 0), (1, "node left", 0)]
    assert [(e["step"], e["lost_steps"]) for e in drill.events("restored")] == [(0, 0), (6, 0), (13, 0)]


def test_the_node_of_rank_0_dies_and_the_other_goes_on(drill, undisturbed):
    """SIGKILL to the agent that has rank 0, the generation's store and its diary; the other one is told by silence alone."""
    drill.shut(10)
    # The last call ends as soon as both are there, however late the second one comes.
    options = ("--max-nodes", "2", "--last-call", "10min", "--max-restarts", "0", "--snapshot-every", "1")
    agents = [drill.start(*options) for _ in range(2)]
    drill.stands(10, ranks=2)
    doomed = drill.agent_of_rank(0, generation=1)
    (other,) = (agent for agent in agents if agent is not doomed)
    doomed.signal(signal.SIGKILL)
    drill.happens("generation_started", generation=2)
    drill.open(10)
    other.ends_with(0)

    drill.is_like(undisturbed)
    generations = [(e["world_size"], e["cause"], e["restarts"]) for e in drill.events("generation_started")]
    assert generations == [(2, "start", 0), (1, "node lost", 0)]
    assert [(e["step"], e["lost_steps"]) for e in drill.events("restored")] == [(0, 0), (9, 0)]


def test_a_frozen_node_is_given_up_and_joins_as_a_newcomer_when_it_wakes(drill, undisturbed):
    """SIGSTOP to every process of the node of rank 0, as a paused container has it, in the middle of a step; the other one trains on alone and meets it again."""
    drill.shut(6, 10)
    options = ("--max-nodes", "2", "--last-call", "10min", "--max-restarts", "0", "--snapshot-every", "1")
    agents = [drill.start(*options) for _ in range(2)]
    drill.stands(6, ranks=2)
    frozen = drill.processes_of(drill.agent_of_rank(0, generation=1))
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    drill.open(6)
    drill.happens("restored", generation=2, step=5, lost_steps=0)
    drill.stands(10, ranks=1)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    drill.happens("drain_requested", generation=2, reason="a node is waiting to join")
    drill.open(10)
    for agent in agents:
        agent.ends_with(0)

    drill.is_like(undisturbed)
    generations = [(e["world_size"], e["cause"]) for e in drill.events("generation_started")]
    assert generations == [(2, "start"), (1, "node lost"), (2, "node joined")]
    assert [(e["step"], e["lost_steps"]) for e in drill.events("restored")] == [(0, 0), (5, 0), (10, 0)]


def test_a_rendezvous_folder_that_is_emptied_while_a_node_trains_is_filled_again(drill, undisturbed):
    """Somebody tidies up in the middle of step 10; a node that comes afterwards finds the group all the same."""
    drill.shut(10)
    first = drill.start(*GROUP)
    drill.stands(10, ranks=1)
    for path in drill.run.rendezvous.iterdir():
        path.unlink(missing_ok=True)
    drill.waits_for(lambda: list(drill.run.rendezvous.glob("state-*")), "the group's state")
    second = drill.start(*GROUP)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(10)
    for agent in (first, second):
        agent.ends_with(0)

    drill.is_like(undisturbed)
    generations = [(e["world_size"], e["cause"], e["restarts"]) for e in drill.events("generation_started")]
    assert generations == [(1, "start", 0), (2, "node joined", 0)]
    assert [(e["step"], e["lost_steps"]) for e in drill.events("restored")] == [(0, 0), (10, 0)]
