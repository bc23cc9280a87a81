"""While no byte can be written in the run directory, saves fail, and nothing else does."""

import os
import signal
from pathlib import Path

import pytest
import run_records
from small_disk import SmallDisk

from elastic.config.run_dir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def disk(drill):
    """The whole run directory is on it."""
    drill.run.local.mkdir()
    disk = SmallDisk(drill.run.local)
    yield disk
    disk.close()


def pid_by_log(drill, agent, log):
    """Of the worker that has this log open; the event with its number may wait for room."""
    logs = {str(Path(f"/proc/{pid}/fd/1").readlink()): pid for pid in drill.processes_of(agent)}
    return next(pid for path, pid in logs.items() if path.endswith(log))


def test_a_death_on_a_full_disk_costs_saves_and_lines(drill, disk, undisturbed):
    """The disk is full when rank 0 is killed at step 8, and until step 18.

    The lines of the next generation wait, since its file needs room of its own. It is killed at
    step 14 as well: they are lost with it, but for the last one, which the snapshot has. The
    workers print more than the last pages of their logs can take.
    """
    env = disk.env | {"TINY_PRINT": "16"}
    folder = str(drill.run.local)
    drill.run = RunDir.parse(str(disk.seen))
    disk.mount("size=6m")
    drill.shut(5, 8, 14, 18)
    agent = drill.start("--snapshot-every", "1", "--run-dir", folder, env=env)
    drill.stands(5, ranks=1)
    pid = drill.pid_of_rank(0, generation=1)
    drill.happens("checkpoint_committed", step=4)  # of a slot that step 7 would write over
    drill.open(5)
    drill.stands(8, ranks=1)
    disk.fill()
    os.kill(pid, signal.SIGKILL)
    drill.waits_for(lambda: "generation 2 (failure)" in agent.output, "generation 2")
    drill.open(8)
    drill.stands(14, ranks=1)
    said = "training goes on. Free space there"
    drill.waits_for(lambda: said in agent.output, "what the node says of a full disk")
    assert drill.last_step == 7
    os.kill(pid_by_log(drill, agent, "000002/rank0.log"), signal.SIGKILL)
    drill.waits_for(lambda: "generation 3 (failure)" in agent.output, "generation 3")
    drill.open(14)
    drill.stands(18, ranks=1)
    assert agent.output.count(said) == 1
    disk.free()
    drill.open(18)
    agent.ends_with(0)

    lines = run_records.lines(drill.run.metrics)
    assert [line["step"] for line in lines] == [*range(1, 8), *range(13, 25)]
    assert [line["chain"] for line in lines] == [undisturbed.chains[line["step"] - 1] for line in lines]
    assert [event["digest"] for event in drill.events("run_finished")] == [undisturbed.digest]
    assert drill.values("restored", "step", "lost_steps")[-1] == (13, 0)
    assert drill.events("checkpoint_failed") and drill.events("checkpoint_committed", step=24)
    assert drill.inspects("verify", drill.run.url)[0] == 0
