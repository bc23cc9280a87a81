"""Storage may lie, fill up or stall: training goes on, and no damaged checkpoint is loaded."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from committed import commit_image
from faulty_storage import Deed, FaultyStorage
from small_disk import SmallDisk

from elastic.checkpoint.catalog import list_commits
from elastic.config.run_dir import RunDir
from elastic.storage.local import LocalStore
from elastic.system.clock import SystemClock

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def payload(drill: Any, step: int) -> Path:
    (found,) = drill.run.local.glob(f"checkpoints/{step:012d}/*/state.safetensors")
    return found


def record(drill: Any, step: int) -> Path:
    return drill.run.local / "checkpoints" / f"{step:012d}" / "COMMIT.json"


def test_damaged_checkpoints_are_passed_over_and_the_result_stays(stopped, undisturbed):
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


def test_a_step_that_another_writer_committed_with_another_state_ends_the_run(drill):
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


def test_a_node_that_leaves_with_another_state_than_is_committed_ends_the_run(drill):
    """Another launch has written the last step of the drain with one bit changed, so that the step
    is saved already when the node looks. A spare waits, and does not go on from either state.
    """
    drill.shut(5, 10)
    agent = drill.start("--max-nodes", "1")
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(10, ranks=1)
    spare = drill.start("--max-nodes", "1")
    drill.waits_for(lambda: "is open without me" in spare.output, "the spare waits")
    store = LocalStore(drill.run.local / "checkpoints")
    (newest, *_), _ = list_commits(store, SystemClock())
    image = bytearray(payload(drill, newest.step).read_bytes())
    image[-1] ^= 1
    commit_image(store, newest.run_id, 10, image)
    agent.signal(signal.SIGTERM)
    drill.happens("drain_requested")
    drill.open(10)
    agent.ends_with(1)
    spare.ends_with(1)

    assert drill.happens("checkpoint_differs")["step"] == 10
    assert len(drill.events("generation_started")) == 1
    for each in (agent, spare):
        assert "step 10 was already committed by generation 1 with another state" in each.output


def test_two_states_of_one_step_end_the_run_in_a_newer_generation_too(drill):
    """One of two nodes leaves after step 6, and the other goes on with that state. Its uploader
    stands still (SIGSTOP), so that another launch is the first to write step 6, with one bit
    changed. The leaver finds that when the others have formed generation 2 long since.
    """
    drill.shut(6, 8)
    drill.start_two("--snapshot-every", "1", "--max-restarts", "0")
    drill.stands(6, ranks=2)
    drill.happens("checkpoint_committed", step=4)
    leaver, other = drill.agents_of_ranks_0_and_1()
    drill.uploader_serves(other)
    uploader = drill.uploader_of(other)
    os.kill(uploader, signal.SIGSTOP)
    leaver.signal(signal.SIGTERM)
    drill.happens("drain_requested")
    drill.open(6)
    drill.happens("generation_started", generation=2)
    drill.stands(8, ranks=1)
    store = LocalStore(drill.run.local / "checkpoints")
    (newest, *_), _ = list_commits(store, SystemClock())
    image = bytearray(payload(drill, newest.step).read_bytes())
    image[-1] ^= 1
    commit_image(store, newest.run_id, 6, image)
    leaver.ends_with(1)
    os.kill(uploader, signal.SIGCONT)
    other.ends_with(1)

    for each in leaver, other:
        assert "step 6 was already committed by generation 1 with another state" in each.output
    assert ", which leaves, found two states of one step: step 6" in other.output
    assert drill.values("run_failed", "generation") == [(2,)]


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


def test_folders_of_logs_and_events_that_cannot_be_used_end_no_training(drill, undisturbed):
    """Both are files while a worker dies, so that no log can be created and no event be read."""
    drill.shut(10, 18)
    agent = drill.start("--snapshot-every", "1")
    drill.stands(10, ranks=1)
    pid = drill.pid_of_rank(0, generation=1)
    drill.happens("checkpoint_committed")
    for folder in drill.run.logs, drill.run.events:
        folder.rename(folder.with_suffix(".aside"))
        folder.write_text("")
    os.kill(pid, signal.SIGKILL)
    drill.waits_for(lambda: "rank 0 runs without a log" in agent.output, "generation 2")
    drill.open(10)
    drill.waits_for(lambda: drill.last_step == 17, "step 17")
    drill.run.events.unlink()
    drill.run.events.with_suffix(".aside").rename(drill.run.events)
    drill.open(18)
    agent.ends_with(0)

    drill.is_like(undisturbed)


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


def test_one_save_that_fails_for_good_is_reported_and_the_run_completes(drill, undisturbed):
    """A file stands where the folder of step 8's checkpoint belongs.

    The gate keeps the next save from taking its place in the queue.
    """
    blocked = drill.run.local / "checkpoints" / f"{8:012d}"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    drill.shut(5, 10)
    agent = drill.start("--keep", "9")
    for gate, name, step in ((5, "checkpoint_committed", 4), (10, "checkpoint_failed", 8)):
        drill.happens(name, step=step)
        drill.open(gate)
    agent.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.inspects("report", drill.run.url)[1]["checkpoints"]["failed"] == 1
    assert blocked.read_text() == "in the way"


@pytest.fixture
def storage(drill: Any, s3: Any, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStorage]:
    """An object store, as the drill's storage."""
    proxy = FaultyStorage(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.chdir(drill.folder)
    drill.run = RunDir.parse(f"{s3_bucket}/run")
    yield proxy
    drill.close()
    proxy.close()


def test_a_rank_killed_between_payload_and_commit_changes_nothing(drill, undisturbed, storage):
    """Object storage holds back the commit record of step 8 while rank 0, whose state it is, is
    killed. The record arrives in the middle of the next generation, which has gone on from the
    memory of this node.
    """
    held = storage.fail(
        Deed.HOLD, lambda method, path: method == "PUT" and path.endswith(f"/{8:012d}/COMMIT.json")
    )
    drill.shut(7, 10)
    agent = drill.start("--nproc-per-node", "2")
    drill.stands(7, ranks=2)
    drill.happens("checkpoint_committed", step=4)
    drill.open(7)
    drill.stands(10, ranks=2)
    drill.waits_for(lambda: held.struck, "the creation of step 8's commit record")
    os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
    drill.happens("restored", generation=2, source="snapshot")
    storage.heal()
    drill.open(10)
    agent.ends_with(0)

    drill.is_like(undisturbed)
    assert [event["generation"] for event in drill.events("checkpoint_committed", step=8)] == [1]
    assert drill.inspects("verify", drill.run.url)[0] == 0
