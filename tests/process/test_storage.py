"""Storage may lie, fill up or stall: training goes on, and no damaged checkpoint is loaded."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from committed import commit_image
from small_disk import SmallDisk

from elastic.checkpoint.catalog import list_commits
from elastic.storage.local import LocalStore
from elastic.system.clock import SystemClock

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def payload(drill: Any, step: int) -> Path:
    (found,) = drill.run.local.glob(f"checkpoints/{step:012d}/*/state.safetensors")
    return found


def record(drill: Any, step: int) -> Path:
    return drill.run.local / "checkpoints" / f"{step:012d}" / "COMMIT.json"


def test_damaged_checkpoints_are_passed_over_the_result_stays(stopped, undisturbed):
    """Of five checkpoints the newest is cut short, one has a flipped bit, one lacks its payload,
    one has half a commit record.
    """
    os.truncate(payload(stopped, 20), payload(stopped, 20).stat().st_size // 2)
    image = bytearray(payload(stopped, 16).read_bytes())
    image[-1] ^= 1
    payload(stopped, 16).write_bytes(image)
    payload(stopped, 12).unlink()
    os.truncate(record(stopped, 8), record(stopped, 8).stat().st_size // 2)
    code, found = stopped.inspects("verify", stopped.run.url)
    assert (code, [item["step"] for item in found["damage"]]) == (1, [20, 16, 12, 8])

    agent = stopped.start("--keep", "9")
    agent.ends_with(0)

    stopped.is_like(undisturbed)
    assert sorted(event["step"] for event in stopped.events("checkpoint_rejected")) == [8, 12, 16, 20]
    assert stopped.values("restored", "step", "lost_steps") == [(0, 0), (4, 16)]
    assert "checkpoint step=20 is not used" in agent.output


def test_another_state_committed_at_a_step_ends_the_run(drill):
    """A second launch without an agent, which no fence stops, has written steps with one bit
    changed. The run ends when it saves one of them, and says what can be done.
    """
    drill.shut(10)
    agent = drill.start("--max-restarts", "2")
    drill.stands(10, ranks=1)
    drill.happens("checkpoint_committed")
    store = LocalStore(drill.run.local / "checkpoints")
    (newest, *_), _ = list_commits(store, SystemClock())
    image = bytearray(payload(drill, newest.step).read_bytes())
    image[-1] ^= 1
    for step in range(10, 25):  # a save may wait for the one before it
        commit_image(store, newest.run_id, step, image)
    drill.open(10)
    agent.ends_with(1)

    step = drill.happens("checkpoint_differs")["step"]
    assert not drill.events("checkpoint_committed", step=step)
    assert len(drill.events("generation_started")) == 1
    assert f"step {step} was already committed by generation 1 with another state" in agent.output
    assert f"move checkpoints/{step:012d} out of the run directory" in agent.output


def test_a_run_of_which_nothing_loads_is_never_started_over(stopped, undisturbed):
    """Every payload is gone, every record is there: exit 76, nothing changed.

    Then --fresh renames the whole run and starts a new one.
    """
    for step in (4, 8, 12, 16, 20):
        payload(stopped, step).unlink()
    kept = [
        stopped.run.metrics,
        *stopped.run.local.glob("checkpoints/**/*.*"),
        stopped.run.local / "run.json",
    ]
    before = {path: path.read_bytes() for path in kept}
    agent = stopped.start()
    agent.ends_with(76)
    assert "elastic-train verify" in agent.output
    assert "states of this run were found, and none of them loads" in agent.output
    assert {path: path.read_bytes() for path in kept} == before
    assert stopped.inspects("verify", stopped.run.url)[0] == 1

    stopped.start("--fresh").ends_with(0)
    stopped.is_like(undisturbed)
    (aside,) = stopped.folder.glob("run.aside-*")
    assert {aside / path.relative_to(stopped.run.local): data for path, data in before.items()} == {
        path: path.read_bytes() for path in (aside / path.relative_to(stopped.run.local) for path in kept)
    }


@pytest.fixture
def small_disk(drill: Any) -> Iterator[SmallDisk]:
    folder = drill.run.local / "checkpoints"
    folder.mkdir(parents=True)
    disk = SmallDisk(folder)
    yield disk
    disk.close()


def test_a_full_disk_fails_saves_and_not_training(drill, undisturbed, small_disk):
    """The checkpoints' disk has room for one of them.

    Training goes on to the end. The last state cannot be saved, and restarts that find it in memory
    do not help. With more room the same command completes the run. Gates let each save end before
    the next one could take its place.
    """
    small_disk.mount("size=240k")
    drill.shut(7, 11)
    agent = drill.start("--max-restarts", "2", "--snapshot-every", "1", env=small_disk.env)
    for gate, name, step in ((7, "checkpoint_committed", 4), (11, "checkpoint_failed", 8)):
        drill.stands(gate, ranks=1)
        drill.happens(name, step=step)
        drill.open(gate)
    agent.ends_with(1)
    assert drill.last_step == 24
    assert drill.values("restored", "step", "source") == [(0, "none"), *[(24, "snapshot")] * 2]
    assert drill.events("checkpoint_failed", step=24)
    assert "The disk or quota is full" in drill.events("checkpoint_failed")[0]["reason"]
    assert "step 4 is the newest that is saved" in agent.output
    assert drill.inspects("report", drill.run.url)[1]["checkpoints"]["failed"] >= 2

    small_disk.mount("remount,size=8m")
    drill.start(env=small_disk.env).ends_with(0)
    drill.is_like(undisturbed)
