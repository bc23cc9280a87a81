"""A planned stop loses nothing, and the run resumes with any number of workers."""

import os
import shutil
import signal


def test_one_three_two_one_workers_give_the_result_of_one(drill, undisturbed):
    """A planned stop between each; four shards do not divide by three workers.

    SIGINT goes to the whole process group, as a terminal sends it. The third stop is a notice in a
    file; a command that never answers runs meanwhile, and is gone soon after each agent.
    """
    notice, limit = drill.folder / "going-away", drill.folder / "limit.py"
    limit.write_text("from elastic.agent import preemption\npreemption.COMMAND_S = 2.0\n")
    options = ("--notice-file", str(notice), "--notice-command", "sleep 10000")
    stops = [(1, 5, signal.SIGTERM), (3, 11, signal.SIGINT), (2, 17, None)]
    drill.shut(*(step for _, step, _ in stops))
    for number, (workers, step, asked) in enumerate(stops, start=1):
        agent = drill.start("--nproc-per-node", str(workers), *options, env={"DRILL_RUNS": str(limit)})
        drill.stands(step, ranks=workers)
        notice.touch() if asked is None else os.killpg(agent.process.pid, asked)
        drill.waits_for(lambda number=number: len(drill.events("drain_requested")) == number, "the drain")
        drill.open(step)
        agent.ends_with(75)
        assert f"step {step} is saved" in agent.output.splitlines()[-1]
        assert drill.events("drained")[-1]["step"] == step
        assert drill.last_step == step
        assert drill.values("worker_exited", "code", generation=number) == [(75,)] * workers
        drill.all_are_gone()
    reason = drill.events("drain_requested")[-1]["reason"]
    assert reason == f"a notice ({notice}) asks this node to leave"
    assert drill.inspects("status", drill.run.url)[1]["state"] == "drained"
    drill.ends_like(undisturbed, drill.start("--nproc-per-node", "1"))
    assert [event["world_size"] for event in drill.events("generation_started")] == [1, 3, 2, 1]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (5, 0), (11, 0), (17, 0)]


def test_a_finished_run_is_reported_and_not_changed(drill, undisturbed):
    """The same command again, on a finished run."""
    shutil.copytree(undisturbed.run.local, drill.run.local)
    before = drill.tree()
    agent = drill.start()
    agent.ends_with(0)

    assert "is finished: 24 steps (" in agent.output
    assert "Nothing was trained. A longer run" in agent.output
    assert f"--from {drill.run.url} --run-dir NEW" in agent.output
    assert drill.tree() == before

    shutil.rmtree(drill.run.rendezvous)  # as with c10d, where each command has a new store
    again = drill.start()
    drill.ends_like(undisturbed, again)
    assert "is finished: 24 steps (" in again.output
