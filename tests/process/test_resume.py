"""A planned stop loses nothing, a killed agent what was not saved, and the run resumes with any
number of workers.
"""

import os
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_one_three_two_one_workers_give_the_result_of_one(drill, undisturbed):
    """A planned stop between each; four shards do not divide by three workers.

    SIGINT goes to the whole process group, as a terminal sends it. The third stop is a notice in a
    file; a command that never answers runs meanwhile, and is gone with each agent.
    """
    notice = drill.folder / "going-away"
    options = ("--notice-file", str(notice), "--notice-command", "sleep 10000")
    stops = [(1, 5, signal.SIGTERM), (3, 11, signal.SIGINT), (2, 17, None)]
    drill.shut(*(step for _, step, _ in stops))
    for number, (workers, step, asked) in enumerate(stops, start=1):
        agent = drill.start("--nproc-per-node", str(workers), *options)
        drill.stands(step, ranks=workers)
        notice.touch() if asked is None else os.killpg(agent.process.pid, asked)
        drill.waits_for(lambda number=number: len(drill.events("drain_requested")) == number, "the drain")
        drill.open(step)
        agent.ends_with(75)
        assert f"step {step} is saved" in agent.output.splitlines()[-1]
        assert drill.events("drained")[-1]["step"] == step
        assert drill.last_step == step
        codes = [e["code"] for e in drill.events("worker_exited", generation=number)]
        assert codes == [75] * workers
        drill.all_are_gone()
    reason = drill.events("drain_requested")[-1]["reason"]
    assert reason == f"a notice ({notice}) asks this node to leave"
    assert drill.inspects("status", drill.run.url)[1]["state"] == "drained"
    drill.ends_like(undisturbed, drill.start("--nproc-per-node", "1"))
    assert [event["world_size"] for event in drill.events("generation_started")] == [1, 3, 2, 1]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (5, 0), (11, 0), (17, 0)]


def test_a_finished_run_is_reported_and_not_changed(drill, undisturbed, copy_run):
    """The same command again, on a finished run."""
    copy_run(undisturbed.run.local)
    before = drill.tree()
    agent = drill.start()
    agent.ends_with(0)

    assert "is finished: 24 steps (" in agent.output
    assert "whatever length the recipe asks for now" in agent.output
    assert f"--from {drill.run.url} --run-dir NEW" in agent.output
    assert drill.tree() == before
    drill.is_like(undisturbed)


def test_a_killed_agent_is_resumed_exactly(drill, undisturbed):
    """SIGKILL to the agent before step 16; steps 4, 8 and 12 are saved. Its workers are in sessions
    of their own, so only the kernel can tell them. Nothing is removed by hand; generations count
    on, and no log is written over.
    """
    drill.shut(5, 9, 13, 16)
    agent = drill.start("--nproc-per-node", "2")
    for gate in (5, 9, 13):  # a step that is due while another is saved is saved later
        drill.stands(gate, ranks=2)
        drill.happens("checkpoint_committed", step=gate - 1)
        drill.open(gate)
    drill.stands(16, ranks=2)
    _, status = drill.inspects("status", drill.run.url)
    seen = tuple(status[name] for name in ("state", "step", "steps", "world_size", "generation"))
    assert seen == ("running", 15, 24, 2, 1)
    assert [worker["pid"] for worker in status["workers"]] == [drill.pid_of_rank(rank, 1) for rank in (0, 1)]
    assert [set(worker) for worker in status["workers"]] == [{"rank", "node", "pid"}] * 2
    assert status["last_checkpoint"]["step"] == 12

    agent.signal(signal.SIGKILL)
    agent.ends_with(-signal.SIGKILL)
    drill.all_are_gone()
    log = drill.run.log(generation=1, rank=0)
    before = log.read_bytes()
    drill.open(16)
    agent = drill.start()
    drill.ends_like(undisturbed, agent)
    assert drill.values("restored", "step", "source", generation=2) == [(12, "checkpoint")]
    assert log.read_bytes() == before and drill.run.log(generation=2, rank=0).exists()
    assert "remove" not in agent.output and "Traceback" not in agent.output
