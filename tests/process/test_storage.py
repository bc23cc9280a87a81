"""Storage may lie, fill up or stall: training goes on, and no damaged checkpoint is loaded."""

import os
import signal
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest
from committed import commit_image, damage

from elastic.checkpoint.catalog import list_commits
from elastic.config.run_dir import RunDir
from elastic.storage.local import LocalStore
from elastic.system.clock import SystemClock


def payload(drill, step):
    return max(drill.run.local.glob(f"checkpoints/{step:012d}/*/*.safetensors"))  # of several parts one


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def files_of(folder):
    """What is never changed."""
    paths = [folder / "metrics.jsonl", folder / "run.json", *folder.glob("checkpoints/**/*.*")]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def test_damaged_checkpoints_are_passed_over_the_result_stays(stopped, undisturbed):
    """Of five checkpoints the newest is cut short, one has a flipped bit, one lacks its payload,
    one has half a commit record.
    """
    halve(payload(stopped, 20))
    damage(stopped.run.local, 16)
    payload(stopped, 12).unlink()
    halve(payload(stopped, 8).with_name("COMMIT.json"))
    code, found = stopped.inspects("verify", stopped.run.url)
    assert (code, [item["step"] for item in found["damage"]]) == (1, [20, 16, 12, 8])

    agent = stopped.start("--keep", "9")
    stopped.ends_like(undisturbed, agent)
    assert sorted(event["step"] for event in stopped.events("checkpoint_rejected")) == [8, 12, 16, 20]
    assert stopped.values("restored", "step", "lost_steps") == [(0, 0), (4, 16)]
    assert "checkpoint step=20 is not used" in agent.output


def test_another_state_committed_at_a_step_ends_the_run(drill):
    """A second launch without an agent, which no fence stops, has written steps with one bit
    changed. The run ends when it saves one of them, and says what can be done.
    """
    agent = drill.start_before(5, "--max-restarts", "2")
    drill.happens("checkpoint_committed", step=4)  # of a slot that step 7 would write over
    store = LocalStore(drill.run.local / "checkpoints")
    (newest, *_), _ = list_commits(store, SystemClock())
    image = bytearray(payload(drill, newest.step).read_bytes())
    image[-1] ^= 1
    for step in range(5, 25):  # a save may wait for the one before it
        commit_image(store, newest.run_id, step, image)
    drill.open(5)
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
    before = files_of(stopped.run.local)
    agent = stopped.start()
    agent.ends_with(76)
    assert "elastic-train verify" in agent.output
    assert "states of this run were found, and none of them loads" in agent.output
    assert files_of(stopped.run.local) == before
    assert stopped.inspects("verify", stopped.run.url)[0] == 1

    stopped.ends_like(undisturbed, stopped.start("--fresh"))
    (aside,) = stopped.folder.glob("run.aside-*")
    assert files_of(aside) == before


class SmallDisk:
    """A file system of limited size, in mount namespaces that need no root.

    A process of its own keeps the namespaces; `env` makes an agent enter them. `seen` is the
    folder as the agents see it, for other processes. Containers may forbid even that.
    """

    def __init__(self, folder):
        folder.mkdir(parents=True)
        own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        mounts = 'mount -t tmpfs -o size=6m tmpfs "$0" && echo && exec sleep infinity'
        words = ["unshare", "--mount", *own_user, "sh", "-c", mounts, str(folder)]
        self._keeper = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        self.env = {"DRILL_NAMESPACES": str(self._keeper.pid)}
        self.seen = Path(f"/proc/{self._keeper.pid}/root{folder}")
        self._filler = self.seen / "filler"
        assert self._keeper.stdout is not None
        if not self._keeper.stdout.readline():
            self.close()
            pytest.skip("NOT TESTED: a full disk needs a mount namespace, which this container forbids")

    def fill(self):
        """To the last byte: a tmpfs counts whole pages."""
        with self._filler.open("ab", buffering=0) as file:
            for piece in (b"x" * 4096, b"x"):
                with suppress(OSError):
                    while file.write(piece) == len(piece):
                        pass

    def free(self):
        self._filler.unlink()

    def close(self):
        self._keeper.kill()
        self._keeper.wait()


@pytest.fixture
def disk(drill):
    """The run directory is on it."""
    with closing(SmallDisk(drill.run.local)) as disk:
        yield disk


def test_a_full_disk_fails_saves_and_not_training(drill, undisturbed, disk):
    """The whole run directory is on a disk that is full from step 8 to step 14 and from step 20 on.

    Rank 0 is killed on it at step 8, and the lines of the next generation wait, since its file
    needs room of its own. The workers print more than the last pages of their logs can take.
    Training goes on to the end. The last state cannot be saved, and restarts that find it in memory
    do not help. With more room the same command completes the run.
    """
    options = ("--snapshot-every", "1", "--max-restarts", "2", "--run-dir", str(drill.run.local))
    env = disk.env | {"TINY_PRINT": "16"}
    drill.run = RunDir.parse(str(disk.seen))
    drill.shut(8, 14, 20)
    agent = drill.start_before(5, *options, env=env)
    pid = drill.pid_of_rank(0, generation=1)
    drill.happens("checkpoint_committed", step=4)  # of a slot that step 7 would write over
    drill.open(5)
    drill.stands(8, ranks=1)
    disk.fill()
    os.kill(pid, signal.SIGKILL)
    drill.waits_for(lambda: "generation 2 (failure)" in agent.output, "generation 2")
    drill.open(8)
    drill.stands(14, ranks=1)
    assert drill.last_step == 7
    disk.free()
    drill.open(14)
    drill.stands(20, ranks=1)
    # Of step 16, or of a later one where a save that waited for room was still under way then.
    drill.waits_for(lambda: max(drill.values("checkpoint_committed", "step")) >= (16,), "a save")
    ((saved,),) = drill.values("checkpoint_committed", "step")[-1:]
    disk.fill()
    drill.open(20)
    agent.ends_with(1)
    for said in (f"step {saved} is the newest that is saved", "generation 4 (failure)"):
        assert said in agent.output
    disk.free()
    assert drill.values("restored", "step", "lost_steps")[:2] == [(0, 0), (7, 0)]
    failed = drill.events("checkpoint_failed")
    assert "The disk or quota is full: free space" in failed[0]["reason"]
    assert drill.inspects("report", drill.run.url)[1]["checkpoints"]["failed"] == len(failed)

    drill.ends_like(undisturbed, drill.start(*options, env=disk.env))
    assert drill.inspects("verify", drill.run.url)[0] == 0
