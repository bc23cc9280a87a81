"""A run ends with the undisturbed digest, whichever process is killed, and at whatever point."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import run_records

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
    "down_s",
    "restore_s",
    "first_step_s",
    "total_s",
}

SECOND_STEP = """
import elastic, torch
run = elastic.start(seed=0, global_batch=4, shards=2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
data = run.data(torch.utils.data.TensorDataset(torch.ones(8, 1)), epochs=16)
for number, step in enumerate(run.steps(data, elastic.State(model=model, optimizer=optimizer))):
    step.mean_loss(lambda batch: model(batch.data[0]).mean())
    optimizer.step()
    if number == 1:
        raise ValueError("the second step of a process")
"""


BY_HAND = """
import elastic, torch
run = elastic.start(seed=0, global_batch=4, shards=2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
for step in run.steps(run.data(torch.ones(8, 1), steps=4), elastic.State(model=model, optimizer=optimizer)):
    total = step.sum(lambda batch: model(batch.data).sum().detach())
    model.weight.grad = total.reshape(1, 1)
    optimizer.step()
"""


def test_a_fault_that_never_struck_is_told_at_the_end_of_the_run(drill):
    """Gradients made by hand have no backward pass, at which the drill was to kill a worker; the
    other fault struck.
    """
    recipe = drill.folder / "by_hand.py"
    recipe.write_text(BY_HAND)
    plan = "step 3 rank 0 backward: kill; step 2 rank 0 optimizer: kill"
    agent = drill.start("--snapshot-every", "1", "--faults", plan, recipe=recipe)
    agent.ends_with(0)
    assert [event["step"] for event in drill.events("fault_injected")] == [2]
    assert agent.output.count("no fault struck: ") == 1
    assert "no fault struck: step 3 rank 0 backward: kill (not reached in 4 steps)" in agent.output


def test_ranks_that_die_at_several_points_of_a_step_do_not_change_the_result(drill, undisturbed):
    """Each rank in turn gets SIGKILL in its forward pass, in the middle of the sum and after the
    optimizer, and one raises.

    One restart without a new step is allowed and four restarts are needed: that progress resets the
    count is part of the proof.
    """
    plan = "step 3 rank 0: kill; step 9 rank 1 mid-sum: kill; step 14 rank 1 backward: raise; step 19 rank 0 optimizer: kill"
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--snapshot-every", "1")
    drill.start(*options, "--faults", plan).ends_with(0)

    drill.is_like(undisturbed)
    assert [event["step"] for event in drill.events("fault_injected")] == [3, 9, 14, 19]
    culprits = drill.values("worker_exited", "generation", "rank", "signal", victim=False)
    assert culprits[:4] == [(1, 0, "SIGKILL"), (2, 1, "SIGKILL"), (3, 1, None), (4, 0, "SIGKILL")]
    victims = set(drill.values("worker_exited", "generation", "rank", victim=True))
    assert victims == {(1, 1), (2, 0), (3, 0), (4, 1)}
    restored = drill.values("restored", "step", "lost_steps")
    # Rank 1 may raise in step 14 while rank 0 copies the state of step 13, or writes its line.
    assert restored in ([(0, 0), (2, 0), (8, 0), kept, (18, 0)] for kept in [(13, 0), (12, 1), (12, 0)])

    # Five generations of two workers leave no more files of events than one.
    writers = {path.name.rpartition("-")[2] for path in drill.run.events.glob("*.jsonl")}
    assert writers == {"agent.jsonl", "uploader.jsonl", "worker0.jsonl", "worker1.jsonl"}
    assert len(list(drill.run.events.glob("*.jsonl"))) == 4

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


def test_an_uploader_killed_at_each_point_of_a_commit_leaves_whole_checkpoints_only(drill, undisturbed):
    """It dies half-way through the payload of step 8, between the payload and the commit record of
    step 12, and, after the agent was killed as well, after the record of the last step, whose
    answer the workers wait for. An agent that starts without its memory must not resume from what
    looks like step 8 or 12.
    """
    plan = "checkpoint 8 upload: kill uploader; checkpoint 12 before-commit: kill uploader; checkpoint 24 after-commit: kill uploader"
    first, second, third = plan.split("; ")
    options = ("--nproc-per-node", "2", "--keep", "9", "--faults", plan)
    drill.shut(5, 11, 12, 15)
    agent = drill.start(*options)
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(11, ranks=2)
    drill.happens("fault_injected", fault=first)
    drill.uploader_serves(agent)
    drill.open(11)
    # Rank 0 asks for the fate of step 8 in each step, and must have heard it before step 12 ends
    # for that to be saved.
    drill.stands(12, ranks=2)
    drill.open(12)
    drill.stands(15, ranks=2)
    drill.happens("fault_injected", fault=second)
    torn = [path.name for path in drill.run.local.glob("checkpoints/000000000012/**/*.*")]
    assert torn == ["state.safetensors"]
    agent.signal(signal.SIGKILL)
    agent.wait()
    drill.open(15)
    drill.start(*options).ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("restored", "step", "source") == [(0, "none"), (4, "checkpoint")]
    assert drill.events("fault_injected", fault=third)
    committed = {path.parent.name for path in drill.run.local.glob("checkpoints/*/COMMIT.json")}
    assert {int(name) for name in committed} >= {4, 24}
    assert drill.inspects("verify", drill.run.url)[0] == 0


def test_saves_that_die_with_their_uploader_count_as_failed(drill, undisturbed):
    """Those of steps 8 and 12; gates let the run know of each end before the next save is due."""
    plan = "checkpoint 8 before-commit: kill uploader; checkpoint 12 upload: kill uploader"
    drill.shut(5, 10, 14)
    agent = drill.start("--nproc-per-node", "2", "--keep", "9", "--faults", plan)
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    for gate, fault in zip((10, 14), plan.split("; "), strict=True):
        drill.stands(gate, ranks=2)
        drill.happens("fault_injected", fault=fault)
        drill.uploader_serves(agent)
        drill.open(gate)
    agent.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("checkpoint_failed", "step", "generation") == [(8, 1), (12, 1)]
    assert not {(8,), (12,)} & set(drill.values("checkpoint_committed", "step"))
    assert drill.inspects("report", drill.run.url)[1]["checkpoints"]["failed"] == 2


def test_a_save_that_outlives_its_generation_is_committed_by_a_node_that_goes_on(drill, undisturbed):
    """The uploader is stopped (SIGSTOP) with the offer of step 4 still unread; meanwhile its worker
    is killed and a new generation begins.
    """
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


def test_a_save_in_hand_is_committed_however_long_the_next_workers_take_to_start(drill, undisturbed):
    """The uploader of rank 0 is stopped with the offer of step 4 still unread, and the other node
    is killed. A third one comes while the fork server is stopped: no worker of generation 2 starts.
    """
    group = "--min-nodes", "2", "--max-nodes", "2", "--snapshot-every", "1"
    drill.shut(3, 6)
    for _ in range(2):
        drill.start(*group)
    drill.stands(3, ranks=2)
    agent, other = drill.agents_of_ranks_0_and_1()
    uploader, worker = drill.uploader_of(agent), drill.pid_of_rank(0, generation=1)
    fork_server = parent_of(worker)
    os.kill(uploader, signal.SIGSTOP)
    drill.open(3)
    drill.stands(6, ranks=2)
    other.signal(signal.SIGKILL)
    drill.happens("worker_exited", rank=0, generation=1)
    os.kill(fork_server, signal.SIGSTOP)
    third = drill.start(*group)
    drill.waits_for(lambda: "generation 2 (" in agent.output, "generation 2")
    os.kill(uploader, signal.SIGCONT)
    ends = "checkpoint_committed", "checkpoint_fenced"
    drill.waits_for(lambda: any(drill.events(end, step=4) for end in ends), "the end of the save")
    assert drill.events("checkpoint_committed", step=4)
    assert not drill.events("worker_started", rank=0, generation=2)
    os.kill(fork_server, signal.SIGCONT)
    drill.open(6)
    for each in (agent, third):
        each.ends_with(0)

    drill.is_like(undisturbed)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


UPLOADER_DIES = """
import os, sys
if "elastic.uploader.main" in sys.orig_argv and os.path.exists("uploader-dies"):
    os._exit(7)
"""


def test_an_uploader_that_dies_again_and_again_is_said_once_and_saves_go_on_afterwards(drill, undisturbed):
    """Each new interpreter reads sitecustomize.py, where that of an uploader ends. Saves of three
    steps find none meanwhile.
    """
    (drill.folder / "sitecustomize.py").write_text(UPLOADER_DIES)
    drill.shut(6, 19)
    agent = drill.start(env={"PYTHONPATH": str(drill.folder)})
    drill.stands(6, ranks=1)
    drill.happens("checkpoint_committed", step=4)
    (drill.folder / "uploader-dies").touch()
    os.kill(drill.uploader_of(agent), signal.SIGKILL)
    drill.happens("uploader_died", deaths=5)
    drill.open(6)
    drill.stands(19, ranks=1)
    drill.happens("uploader_died", deaths=6)
    (drill.folder / "uploader-dies").unlink()
    drill.uploader_serves(agent)
    drill.open(19)
    drill.happens("checkpoint_committed", step=20)
    agent.ends_with(0)

    drill.is_like(undisturbed)
    assert agent.output.count("NOTHING IS SAVED") == 1
    assert [event["step"] for event in drill.events("checkpoint_committed")] == [4, 20, 24]
    assert len(drill.events("generation_started")) == 1


def test_a_run_that_fails_waits_for_the_save_in_progress_and_says_so(drill):
    """The uploader is stopped (SIGSTOP) with the offer of step 4 still unread; the run fails."""
    drill.shut(3, 6)
    agent = drill.start("--max-restarts", "0", "--snapshot-every", "1")
    drill.stands(3, ranks=1)
    uploader = drill.uploader_of(agent)
    os.kill(uploader, signal.SIGSTOP)
    drill.open(3)
    drill.stands(6, ranks=1)
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.waits_for(lambda: "waiting for the save in progress" in agent.output, "the wait for the save")
    os.kill(uploader, signal.SIGCONT)
    agent.ends_with(1)
    assert "step 5 is the newest that is saved" in agent.output


def test_a_save_of_an_evicted_node_is_never_committed(drill, undisturbed):
    """The node of rank 0 is frozen, agent and uploader, with the offer of step 4 unread. The other
    goes on; then the uploader alone wakes up.
    """
    drill.shut(3, 6, 8)
    drill.start_two("--snapshot-every", "off")
    drill.stands(3, ranks=2)
    frozen, other = drill.agents_of_ranks_0_and_1()
    uploader = drill.uploader_of(frozen)
    os.kill(uploader, signal.SIGSTOP)
    drill.open(3)
    drill.stands(6, ranks=2)
    frozen.signal(signal.SIGSTOP)
    drill.open(6)
    drill.happens("generation_started", generation=2)
    drill.stands(8, ranks=1)
    os.kill(uploader, signal.SIGCONT)
    assert "found it silent" in drill.happens("checkpoint_failed", step=4)["reason"]
    frozen.signal(signal.SIGKILL)
    drill.open(8)
    other.ends_with(0)

    drill.is_like(undisturbed)
    assert not drill.events("checkpoint_committed", step=4)


def test_a_recipe_that_raises_ends_the_run_and_its_traceback_is_printed_last(drill, undisturbed):
    """Rank 1 raises in step 6 whenever it gets there; rank 0 breaks with it and must not be taken
    for the cause. The same error at the same step ends the run with restarts left. Then the recipe
    is mended.
    """
    agent = drill.start("--nproc-per-node", "2", "--snapshot-every", "1", env={"TINY_RAISE": "6 1"})
    agent.ends_with(1)

    *_, last = agent.output.rstrip().splitlines()
    assert last == "RuntimeError: the recipe's own mistake on rank 1"
    end = agent.output[agent.output.rindex("training failed: ") :]
    assert "first failing worker: rank 1 on" in end
    assert "step 5 is the newest that is saved" in end  # it was in memory alone
    assert end.count("Traceback") == 1
    assert "the same error came back in step 6 after a restart from step " in end
    assert [event["rank"] for event in drill.events("worker_failed")] == [1, 1]
    assert {event["rank"] for event in drill.events("worker_exited", victim=True)} == {0}
    assert [event["restarts"] for event in drill.events("generation_started")] == [0, 1]
    assert drill.inspects("status", drill.run.url)[1]["state"] == "failed"

    drill.start().ends_with(0)
    drill.is_like(undisturbed)


def test_an_error_in_the_second_step_of_every_process_uses_up_the_restarts(drill):
    """Each generation trains a step, so that none of them counts as a restart by itself."""
    recipe = drill.folder / "second.py"
    recipe.write_text(SECOND_STEP)
    agent = drill.start("--max-restarts", "2", "--snapshot-every", "1", recipe=recipe)
    agent.ends_with(1)
    said = "the same error ended 3 generations in a row, each after one step, and --max-restarts is 2"
    assert said in agent.output
    assert agent.output.rstrip().endswith("ValueError: the second step of a process")


def test_no_worker_outlives_a_killed_agent_and_the_same_command_resumes(drill, undisturbed):
    """SIGKILL to the agent while its workers stand in step 10; they are in sessions of their own,
    so only the kernel can tell them.
    """
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
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (8, 1)]


# What a plan can do beside killing workers and uploaders.

ALWAYS = ("--snapshot-every", "1")


def test_a_rank_that_exits_hangs_or_pauses_does_not_change_the_result(drill, undisturbed):
    """An exit code, a stop of the heartbeat in the middle of backward, and a SIGSTOP that ends by
    itself: only the first two cost a generation.
    """
    plan = "step 4 rank 1: exit 9; step 8 rank 0 backward: hang; step 13 rank 1 optimizer: pause 1s"
    options = ("--nproc-per-node", "2", "--hang-timeout", "4", "--snapshot-every", "1")
    drill.start(*options, "--faults", plan).ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("fault_injected", "generation", "step") == [(1, 4), (2, 8), (3, 13)]
    assert [e["code"] for e in drill.events("worker_exited", generation=1, victim=False)] == [9]
    assert [e["rank"] for e in drill.events("hang_detected")] == [0]
    assert len(drill.events("generation_started")) == 3
    # Rank 0 wrote down step 14 after its sum, which rank 1 slept before.
    paused = drill.happens("fault_injected", step=13)["time"]
    assert run_records.lines(drill.run.metrics)[13]["time"] - paused >= 1.0


def test_a_rank_killed_in_its_snapshot_leaves_a_torn_slot_that_is_not_used(drill, undisturbed):
    """The line of step 9 is written, half of its state is copied: step 8 is what is found. Then
    rank 1, which copies nothing, while rank 0 does.
    """
    plan = "step 9 snapshot: kill; step 15 rank 1 snapshot: kill"
    options = ("--nproc-per-node", "2", "--snapshot-every", "1", "--save-every", "10min")
    drill.start(*options, "--faults", plan).ends_with(0)

    drill.is_like(undisturbed)
    first, second, third = drill.values("restored", "step", "source", "lost_steps")
    assert first == (0, "none", 0)
    assert second == (8, "snapshot", 1)
    # Where rank 0 is killed for it is open.
    assert third[0] in {14, 15}


def test_a_rank_killed_while_it_restores_is_restored_again(drill, undisturbed):
    """In generation 1 a rank that has nothing to load; in generation 3 rank 1, which has loaded
    step 4 and not reported it.
    """
    plan = "generation 1 rank 0 restore: kill; step 5: kill; generation 3 rank 1 restore: kill"
    options = ("--nproc-per-node", "2", "--snapshot-every", "1")
    drill.start(*options, "--faults", plan).ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("fault_injected", "generation", "step") == [(1, None), (2, 5), (3, None)]
    assert drill.values("restored", "generation", "step") == [(2, 0), (4, 4)]
    recoveries = drill.inspects("report", drill.run.url)[1]["recoveries"]
    assert [each["tries"] for each in recoveries] == [1, 1, 2]
    assert recoveries[2]["total_s"] > sum(
        recoveries[2][f"{phase}_s"] for phase in ("detect", "rendezvous", "down", "restore", "first_step")
    )
    assert f"after {recoveries[2]['total_s']:.2f} s in 2 tries: rank" in drill.output
    assert "generation 1 ends before its first step: rank 0 ended with signal 9" in drill.output
    assert "generation 2 ends after step 4: " in drill.output
    assert "generation 3 ends before its first step: rank 1 ended with signal 9" in drill.output


def test_a_node_killed_by_a_plan_dies_with_all_its_processes(drill, undisturbed):
    """Node 0, with rank 0, once its worker has finished step 9: agent, worker, fork server and
    uploader are gone, and the other goes on.
    """
    drill.shut(10)
    plan = "step 9 node 0: kill"
    drill.start_two(*ALWAYS, "--faults", plan)
    killed, other = drill.agents_of_ranks_0_and_1()
    killed.ends_with(-signal.SIGKILL)
    drill.waits_for(
        lambda: set(drill.alive()) == set(drill.processes_of(other)), "the end of all processes of the node"
    )
    drill.open(10)
    other.ends_with(0)

    drill.is_like(undisturbed)
    assert [e["step"] for e in drill.events("fault_injected")] == [9]
    assert drill.events("generation_started", generation=2, cause="node lost", world_size=1)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_killed_before_its_workers_start_is_evicted(drill, undisturbed, node):
    """Generation 2 has formed with both; one of them, with node 0 also the one that keeps the
    generation's store, never starts its workers.
    """
    plan = f"step 5: kill; generation 2 node {node} rendezvous: kill"
    agents = drill.start_two(*ALWAYS, "--faults", plan)
    codes = sorted(agent.wait() for agent in agents)

    assert codes == [-signal.SIGKILL, 0], drill.output
    drill.is_like(undisturbed)
    assert drill.values("fault_injected", "generation", "step") == [(1, 5), (2, None)]
    assert drill.events("generation_started", cause="node lost", world_size=1)


def test_repeated_random_kills_do_not_change_the_result(drill, undisturbed):
    """Three workers at least, while the run stands before step 10. Then the agent is killed, and
    the same command without a plan finishes.
    """
    drill.shut(10)
    options, plan = ("--nproc-per-node", "2"), "every 3±1s: kill random worker, seed 7"
    agent = drill.start(*options, "--max-restarts", "99", "--faults", plan)
    drill.waits_for(lambda: len(drill.events("fault_injected", fault=plan)) >= 3, plan)
    agent.signal(signal.SIGKILL)
    drill.all_are_gone()
    drill.open(10)
    drill.start(*options).ends_with(0)

    drill.is_like(undisturbed)
    assert len(drill.events("generation_started")) >= 3


PAUSING = """
import os, subprocess, sys
from elastic.faults.inject import pause
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
pause([os.getpid()] + [child.pid] * (sys.argv[1] == "tree"), 0.2)
found = os.waitpid(child.pid, os.WCONTINUED | os.WNOHANG)[1]
child.communicate(b"")
sys.exit(7 if found and os.WIFCONTINUED(found) else 8)
"""


@pytest.mark.parametrize(("whom", "code"), [("self", 8), ("tree", 7)])
def test_a_paused_process_was_stopped_and_continued(whom, code):
    """The kernel keeps for the parent that a child was stopped and continued; the pausing process
    says the same of its own child.
    """
    process = subprocess.Popen([sys.executable, "-c", PAUSING, whom])
    _, status = os.waitpid(process.pid, os.WCONTINUED)
    assert os.WIFCONTINUED(status)
    assert process.wait() == code
