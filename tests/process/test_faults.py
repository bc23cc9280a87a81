"""A run ends with the undisturbed digest, whichever process is killed, and at whatever point."""

import signal

import run_records

TWO = ("--nproc-per-node", "2")
PLAN = {
    "step 3 rank 0": "kill",
    "step 6 snapshot": "kill",
    "step 9 rank 1 mid-sum": "kill",
    "step 12 rank 1": "exit 9",
    "step 14 rank 1 backward": "raise",
    "step 17 rank 1 optimizer": "pause 1s",
    "step 19 rank 0 optimizer": "kill",
    "generation 7 rank 1 restore": "kill",
    "generation 99 rank 0 restore": "kill",
}
BEFORE_SUMS = 3, 9, 12, 14  # steps in which votes are not told yet when a rank dies
PHASES = ("detect_s", "rendezvous_s", "down_s", "restore_s", "first_step_s")


def test_ranks_that_die_at_any_point_do_not_change_the_result(drill, undisturbed):
    """A rank dies before, in and after a step, in its snapshot, which is torn and not used, and
    while it restores; one exits, raises or pauses. The last fault of the plan never strikes. No
    rank dies before both have voted on the step before: they stand at a gate until then.

    Two restarts without a new step are allowed and six are needed: that progress resets the count
    is part of the proof.
    """
    plan = "; ".join(f"{place}: {what}" for place, what in PLAN.items())
    drill.shut(*BEFORE_SUMS)
    agent = drill.start(*TWO, "--max-restarts", "2", "--snapshot-every", "1", "--faults", plan)
    for gate in BEFORE_SUMS:
        drill.stands(gate, ranks=2)
        drill.open(gate)
    drill.ends_like(undisturbed, agent)

    assert drill.values("fault_injected", "step") == [(3,), (6,), (9,), (12,), (14,), (17,), (19,), (None,)]
    assert agent.output.count("no fault struck: ") == 1
    assert "no fault struck: generation 99 rank 0 restore: kill" in agent.output
    ended = drill.values("worker_exited", "generation", "rank", victim=False)[:7]
    assert ended == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 0), (7, 1)]
    assert [e["code"] for e in drill.events("worker_exited", generation=4, victim=False)] == [9]
    victims = set(drill.values("worker_exited", "generation", "rank", victim=True))
    assert victims >= {(generation, 1 - rank) for generation, rank in ended[:6]}
    restored = drill.values("restored", "generation", "step", "lost_steps")
    assert restored == [(1, 0, 0), (2, 2, 0), (3, 5, 1), (4, 8, 0), (5, 11, 0), (6, 13, 0), (8, 18, 0)]
    # Rank 0 wrote down step 18 after its sum, which rank 1 slept before.
    written = run_records.lines(drill.run.metrics)[17]["time"]
    assert written - drill.happens("fault_injected", step=17)["time"] >= 1.0
    # Generations leave no more files of events than one.
    writers = [path.name.rpartition("-")[2] for path in drill.run.events.glob("*.jsonl")]
    assert sorted(writers) == ["agent.jsonl", "uploader.jsonl", "worker0.jsonl", "worker1.jsonl"]

    code, report = drill.inspects("report", drill.run.url)
    assert (code, report["finished"], report["steps"], report["epochs"]) == (0, True, 24, 3)
    assert report["final_digest"] == undisturbed.digest
    assert report["lost_steps"] == sum(lost for _, _, lost in restored)
    recoveries = report["recoveries"]
    assert [(each["cause"], each["tries"]) for each in recoveries] == [("failure", 1)] * 6 + [("failure", 2)]
    assert recoveries[-1]["total_s"] > sum(recoveries[-1][phase] for phase in PHASES)
    assert f"after {recoveries[-1]['total_s']:.2f} s in 2 tries: rank" in agent.output
    assert "generation 7 ends before its first step: rank 1 ended with signal 9" in agent.output


def test_an_uploader_killed_in_a_commit_leaves_whole_checkpoints(drill, undisturbed):
    """It dies half-way through the payload of step 8, between the payload and the commit record of
    step 12, and, after the agent was killed as well, after the record of the last step, whose
    answer the workers wait for. An agent that starts without its memory must not resume from what
    looks like step 8 or 12.
    """
    plan = "checkpoint 8 upload: kill uploader; checkpoint 12 before-commit: kill uploader; checkpoint 24 after-commit: kill uploader"
    first, second, third = plan.split("; ")
    options = (*TWO, "--keep", "9", "--faults", plan)
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
    drill.happens("checkpoint_failed", step=8)
    drill.open(12)
    drill.stands(15, ranks=2)
    drill.happens("fault_injected", fault=second)
    torn = [path.name for path in drill.run.local.glob("checkpoints/000000000012/**/*.*")]
    assert torn and "COMMIT.json" not in torn
    _, status = drill.inspects("status", drill.run.url)
    assert [worker["pid"] for worker in status["workers"]] == [drill.pid_of_rank(rank, 1) for rank in (0, 1)]
    assert (status["state"], status["step"], status["last_checkpoint"]["step"]) == ("running", 14, 4)
    agent.signal(signal.SIGKILL)
    agent.wait()
    drill.all_are_gone()  # workers are in sessions of their own: the kernel alone can tell them
    log = drill.run.log(generation=1, rank=0)
    before = log.read_bytes()
    drill.open(15)
    drill.ends_like(undisturbed, drill.start(*options))

    assert drill.values("restored", "generation", "step", "source") == [(1, 0, "none"), (2, 4, "checkpoint")]
    assert log.read_bytes() == before and drill.run.log(generation=2, rank=0).exists()
    assert drill.events("fault_injected", fault=third)
    assert drill.is_committed(4) and drill.is_committed(24)
    assert drill.inspects("verify", drill.run.url)[0] == 0


def test_a_recipe_that_raises_ends_the_run_traceback_last(drill, undisturbed):
    """Rank 1 raises in step 6 whenever it gets there; rank 0 breaks with it and must not be taken
    for the cause. The second failure in a row is one too many. Then the recipe is mended.
    """
    raising = "--snapshot-every", "1", "--max-restarts", "1"
    agent = drill.start_before(
        6, *TWO, *raising, ranks=2, env={"TINY_RAISE": "6 1"}
    )  # by now rank 0 has copied the state of step 5
    drill.open(6)
    agent.ends_with(1)

    assert agent.output.rstrip().endswith("\nRuntimeError: the recipe's own mistake on rank 1")
    end = agent.output[agent.output.rindex("training failed: ") :]
    assert "first failing worker: rank 1 on" in end and end.count("Traceback") == 1
    assert "step 5 is the newest that is saved" in end  # it was in memory alone
    assert "that was failure 2 in a row without a new step, and --max-restarts is 1" in end
    assert [event["rank"] for event in drill.events("worker_failed")] == [1, 1]
    assert {event["rank"] for event in drill.events("worker_exited", victim=True)} == {0}
    assert [event["restarts"] for event in drill.events("generation_started")] == [0, 1]
    assert drill.inspects("status", drill.run.url)[1]["state"] == "failed"
    drill.ends_like(undisturbed, drill.start())
