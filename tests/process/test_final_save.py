"""A node that leaves tries again to save its last step until its grace ends.

Whatever happens to its first try, the exit code is 75 and the same command loses no step.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
from small_disk import SmallDisk

from elastic.config.run_dir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# No save becomes due by itself: what is committed is committed because of the stop.
STOPPED = ("--save-every", "1000steps", "--grace", "60s")


def stop_at_8(drill, agent):
    drill.stands(8, ranks=1)
    agent.signal(signal.SIGTERM)
    drill.happens("drain_requested")
    drill.open(8)


def connections(path):
    """Of a socket, also those that its process has not accepted yet."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(f" {path}") for line in lines)


def nothing_is_lost(drill, agent, undisturbed):
    agent.ends_with(75)
    assert "step 8 is saved" in agent.output.splitlines()[-1]
    drill.ends_like(undisturbed, drill.start(*STOPPED))
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (8, 0)]


def test_an_uploader_that_is_killed_in_it_is_started_again(drill, undisturbed):
    drill.shut(8)
    agent = drill.start(*STOPPED, "--faults", "checkpoint 8 before-commit: kill uploader")
    stop_at_8(drill, agent)
    nothing_is_lost(drill, agent, undisturbed)
    assert len(drill.events("fault_injected")) == 1
    assert len(drill.events("uploader_died")) == 1


def test_a_rendezvous_that_is_removed_meanwhile_stops_no_save(drill, undisturbed):
    """The uploader stands still while a person moves the run away and puts a copy of it back, all
    but the rendezvous. The agent has handed the save over by then, and asks the group no more.
    """
    drill.shut(8)
    agent = drill.start(*STOPPED)
    drill.stands(8, ranks=1)
    uploader = drill.uploader_of(agent)
    place = drill.socket_of_uploader(uploader)
    os.kill(uploader, signal.SIGSTOP)
    before = connections(place)
    stop_at_8(drill, agent)
    drill.waits_for(lambda: connections(place) > before, "the offer of the last step")
    moved = drill.run.local.rename(drill.folder / "moved")
    shutil.copytree(moved, drill.run.local, ignore=shutil.ignore_patterns("rendezvous"))
    os.kill(uploader, signal.SIGCONT)
    nothing_is_lost(drill, agent, undisturbed)


def test_a_disk_that_has_room_again_within_the_grace_takes_it(drill, undisturbed):
    folder = str(drill.run.local)
    drill.run.local.mkdir()
    disk = SmallDisk(drill.run.local)
    try:
        drill.run = RunDir.parse(str(disk.seen))
        disk.mount("size=6m")
        drill.shut(8)
        options = (*STOPPED, "--run-dir", folder)
        agent = drill.start(*options, env=disk.env)
        drill.stands(8, ranks=1)
        disk.fill()
        agent.signal(signal.SIGTERM)
        drill.waits_for(lambda: "asks this node to leave" in agent.output, "the request")
        drill.open(8)
        said = "checkpoint step=8 is not saved yet, and is tried again"
        drill.waits_for(lambda: said in agent.output, "the first try")
        disk.free()
        agent.ends_with(75)
        assert "step 8 is saved" in agent.output.splitlines()[-1]
        drill.ends_like(undisturbed, drill.start(*options, env=disk.env))
    finally:
        disk.close()


def test_a_third_signal_ends_the_tries(drill):
    """A file is in the place of the checkpoints, so no save ends; each problem is said once."""
    drill.shut(8)
    agent = drill.start("--save-every", "1000steps", "--grace", "1h")
    drill.stands(8, ranks=1)
    checkpoints = drill.run.local / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    checkpoints.write_text("")
    stop_at_8(drill, agent)
    drill.waits_for(lambda: "is tried again" in agent.output, "the first try")

    def has_ended():
        agent.signal(signal.SIGTERM)  # two at once would be one
        return agent.process.poll() is not None

    drill.waits_for(has_ended, "its end after two more signals")
    agent.ends_with(1)
    last = agent.output.splitlines()[-1]
    assert "the save of the last step did not end in time; step 8 was trained" in last
    assert agent.output.count("cannot be listed") == agent.output.count("is tried again") == 1
    drill.all_are_gone()
