"""Whatever kills a worker, an uploader or an agent, and whenever: the run ends with the digest of the run in which nothing broke."""

import os
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

REPORT = {
    "finished", "steps", "epochs", "final_digest", "lost_steps", "goodput", "step_time_s", "checkpoints", "generations",
    "recoveries",
}  # fmt: skip
GENERATION = {"generation", "world_size", "nodes", "first_step", "last_step", "cause"}
RECOVERY = {
    "cause",
    "lost_steps",
    "source",
    "detect_s",
    "rendezvous_s",
    "restore_s",
    "first_step_s",
    "total_s",
}


def test_ranks_that_die_at_several_points_of_a_step_leave_no_trace_in_the_result(drill, undisturbed):
    """Each rank in turn gets SIGKILL in its forward pass, in the middle of the sum and after the optimizer, and one raises.

    One restart without a new step is allowed and four restarts are needed: that progress resets the count is part of the proof.
    """
    plan = "step 3 rank 0: kill; step 9 rank 1 mid-sum: kill; step 14 rank 1 backward: raise; step 19 rank 0 optimizer: kill"
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--snapshot-every", "1")
    drill.start(*options, "--faults", plan).ends_with(0)

    drill.is_like(undisturbed)
    assert [event["step"] for event in drill.events("fault_injected")] == [3, 9, 14, 19]
    culprits = [
        (e["generation"], e["rank"], e["signal"]) for e in drill.events("worker_exited", victim=False)
    ]
    assert culprits[:4] == [(1, 0, "SIGKILL"), (2, 1, "SIGKILL"), (3, 1, None), (4, 0, "SIGKILL")]
    victims = {(e["generation"], e["rank"]) for e in drill.events("worker_exited", victim=True)}
    assert victims == {(1, 1), (2, 0), (3, 0), (4, 1)}
    restored = [(e["step"], e["lost_steps"]) for e in drill.events("restored")]
    assert restored == [(0, 0), (2, 0), (8, 0), (13, 0), (18, 0)]

    code, report = drill.inspects("report", drill.run.url)
    assert code == 0
    assert report.keys() >= REPORT
    assert (report["finished"], report["steps"], report["epochs"]) == (True, 24, 3)
    assert report["final_digest"] == undisturbed.digest
    assert report["lost_steps"] == sum(lost for _, lost in restored)
    assert len(report["generations"]) == 5
    assert all(generation.keys() >= GENERATION for generation in report["generations"])
    assert [recovery["cause"] for recovery in report["recoveries"]] == ["failure"] * 4
    assert all(recovery.keys() >= RECOVERY and recovery["total_s"] > 0 for recovery in report["recoveries"])


def test_a_loss_that_couples_samples_survives_a_kill_among_three_workers(drill, undisturbed_sum):
    """Four shards on three ranks, so one rank has two; the last one is killed while the gradients of its shard are there and unsent."""
    plan = "step 6 rank 2 backward: kill"
    drill.start("--nproc-per-node", "3", "--faults", plan, arguments=("--form", "sum")).ends_with(0)

    drill.is_like(undisturbed_sum)
    assert len(drill.events("fault_injected")) == 1


def test_an_uploader_killed_at_each_point_of_a_commit_leaves_whole_checkpoints_only(drill, undisturbed):
    """It dies half-way through the payload of step 8, between the payload and the commit record of step 12, and, after the agent was killed as well, after the
    record of the last step, whose answer the workers wait for. Whoever comes back without its memory must not resume from what looks like step 8 or 12.
    """
    plan = "checkpoint 8 upload: kill uploader; checkpoint 12 before-commit: kill uploader; checkpoint 24 after-commit: kill uploader"
    first, second, third = plan.split("; ")
    options = ("--nproc-per-node", "2", "--keep", "9", "--faults", plan)
    drill.shut(5, 11, 15)
    agent = drill.start(*options)
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(11, ranks=2)
    drill.happens("fault_injected", fault=first)
    drill.uploader_serves(agent)
    drill.open(11)
    drill.stands(15, ranks=2)
    drill.happens("fault_injected", fault=second)
    torn = [path.name for path in drill.run.local.glob("checkpoints/000000000012/**/*.*")]
    assert torn == ["state.safetensors"]
    agent.signal(signal.SIGKILL)
    agent.wait()
    drill.open(15)
    drill.start(*options).ends_with(0)

    drill.is_like(undisturbed)
    assert [(e["step"], e["source"]) for e in drill.events("restored")] == [(0, "none"), (4, "checkpoint")]
    assert drill.events("fault_injected", fault=third)
    committed = {path.parent.name for path in drill.run.local.glob("checkpoints/*/COMMIT.json")}
    assert {int(name) for name in committed} >= {4, 24}
    assert drill.inspects("verify", drill.run.url)[0] == 0


def test_a_save_that_outlives_its_generation_is_committed_by_a_node_that_goes_on(drill, undisturbed):
    """The uploader is stopped (SIGSTOP) with the offer of step 4 still unread; meanwhile its worker is killed and a new generation begins."""
    drill.shut(3, 6)
    agent = drill.start()
    drill.stands(3, ranks=1)
    uploader = drill.uploader_of(agent)
    os.kill(uploader, signal.SIGSTOP)
    drill.open(3)
    drill.stands(6, ranks=1)
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.happens("generation_started", generation=2)
    os.kill(uploader, signal.SIGCONT)
    drill.happens("checkpoint_committed", step=4)
    drill.open(6)
    agent.ends_with(0)

    drill.is_like(undisturbed)


def test_a_save_of_a_node_that_was_given_up_is_never_committed(drill, undisturbed):
    """The node of rank 0 is frozen, agent and uploader, with the offer of step 4 unread. The other goes on; then the uploader alone wakes up."""
    drill.shut(3, 6, 8)
    options = ("--max-nodes", "2", "--last-call", "10min", "--snapshot-every", "off")
    agents = [drill.start(*options) for _ in range(2)]
    drill.stands(3, ranks=2)
    frozen = drill.agent_of_rank(0, generation=1)
    (other,) = (agent for agent in agents if agent is not frozen)
    uploader = drill.uploader_of(frozen)
    os.kill(uploader, signal.SIGSTOP)
    drill.open(3)
    drill.stands(6, ranks=2)
    frozen.signal(signal.SIGSTOP)
    drill.open(6)
    drill.happens("generation_started", generation=2)
    drill.stands(8, ranks=1)
    os.kill(uploader, signal.SIGCONT)
    drill.happens("checkpoint_fenced", step=4)
    frozen.signal(signal.SIGKILL)
    drill.open(8)
    other.ends_with(0)

    drill.is_like(undisturbed)
    assert not drill.events("checkpoint_committed", step=4)


def test_a_recipe_that_raises_ends_the_run_after_its_restarts_with_its_traceback_last(drill, undisturbed):
    """Rank 1 raises in step 6 whenever it gets there; rank 0 breaks with it and must not be taken for the cause. Then the recipe is mended."""
    agent = drill.start("--nproc-per-node", "2", "--max-restarts", "1", env={"TINY_RAISE": "6 1"})
    agent.ends_with(1)

    *_, last = agent.output.rstrip().splitlines()
    assert last == "RuntimeError: the recipe's own mistake on rank 1"
    end = agent.output[agent.output.rindex("training failed: ") :]
    assert "first failing worker: rank 1 on" in end
    assert "Step 4 is the newest that is saved" in end
    assert end.count("Traceback") == 1
    assert "a victim of another failure" in agent.output
    assert [event["rank"] for event in drill.events("worker_failed")] == [1, 1]
    assert {event["rank"] for event in drill.events("worker_exited", victim=True)} == {0}
    assert [event["restarts"] for event in drill.events("generation_started")] == [0, 1]
    assert drill.inspects("status", drill.run.url)[1]["state"] == "failed"

    drill.start().ends_with(0)
    drill.is_like(undisturbed)


def test_no_worker_outlives_a_killed_agent_and_the_same_command_resumes(drill, undisturbed):
    """SIGKILL to the agent while its workers stand in step 10; they are in sessions of their own, so only the kernel can tell them."""
    drill.shut(5, 10)
    agent = drill.start("--nproc-per-node", "2")
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(10, ranks=2)
    drill.happens("checkpoint_committed", step=8)
    _, status = drill.inspects("status", drill.run.url)
    assert (status["state"], status["step"], status["steps"], status["world_size"]) == ("running", 9, 24, 2)
    assert [worker["pid"] for worker in status["workers"]] == [drill.pid_of_rank(rank, 1) for rank in (0, 1)]
    assert [set(worker) for worker in status["workers"]] == [{"rank", "node", "pid"}] * 2
    assert status["last_checkpoint"]["step"] == 8
    assert status["generation"] == 1

    agent.signal(signal.SIGKILL)
    agent.ends_with(-signal.SIGKILL)
    drill.all_are_gone()
    drill.open(10)
    drill.start().ends_with(0)

    drill.is_like(undisturbed)
    assert [(e["step"], e["lost_steps"]) for e in drill.events("restored")] == [(0, 0), (8, 1)]
