"""While no byte can be written in the run directory, saves fail, and nothing else does."""

import os
import signal

import pytest
from etcd_servers import free_port
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


@pytest.mark.parametrize("backend", ["dir", "c10d"])
def test_a_death_a_join_and_a_generation_on_a_full_disk_cost_nothing(drill, disk, undisturbed, backend):
    """The disk is full from step 8 to step 18. Meanwhile rank 0 is killed and another node joins.

    With a folder, the group's own state and heartbeats are on that disk. No line of the metrics is
    lost, and each log is there in the end. The workers print more than the last pages of all files
    can take, which have room on a full disk too.
    """
    env = disk.env | {"TINY_PRINT": "16"}
    folder = str(drill.run.local)
    drill.run = RunDir.parse(str(disk.seen))
    disk.mount("size=6m")
    options = ["--max-nodes", "2", "--last-call", "0s", "--snapshot-every", "1", "--run-dir", folder]
    if backend == "c10d":
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    drill.shut(8, 14, 18)
    first = drill.start(*options, env=env)
    drill.stands(8, ranks=1)
    pid = drill.pid_of_rank(0, generation=1)
    drill.happens("checkpoint_committed", step=4)
    disk.fill()
    os.kill(pid, signal.SIGKILL)
    drill.waits_for(lambda: "generation 2 (failure)" in first.output, "generation 2")
    drill.open(8)
    drill.stands(14, ranks=1)
    disk.fill()
    second = drill.start(*options, env=env)
    drill.waits_for(lambda: "a node is waiting to join" in first.output, "the request of a drain")
    drill.open(14)
    drill.stands(18, ranks=2)
    disk.fill()
    said = "training goes on. Free space there"
    drill.waits_for(lambda: said in first.output, "what the node says of a full disk")
    assert first.output.count(said) == 1
    disk.free()
    drill.open(18)
    for agent in (first, second):
        agent.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("generation_started", "world_size", "cause", "restarts") == [
        (1, "start", 0),
        (1, "failure", 1),
        (2, "node joined", 0),
    ]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (7, 0), (14, 0)]
    assert "there is room in" in first.output
    logs = {path.relative_to(drill.run.logs).as_posix() for path in drill.run.logs.glob("*/*.log")}
    assert {"000001/rank0.log", "000002/rank0.log", "000003/rank0.log", "000003/rank1.log"} <= logs


def test_a_lease_is_renewed_on_a_full_disk(drill, disk, undisturbed):
    """Nodes meet elsewhere, so that nothing of them but the lease moves in the run directory."""
    folder = str(drill.run.local)
    drill.run = RunDir.parse(str(disk.seen))
    disk.mount("size=6m")
    options = ["--max-nodes", "2", "--last-call", "0s", "--run-dir", folder]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    drill.shut(8)
    first = drill.start(*options, *where, env=disk.env)
    drill.stands(8, ranks=1)
    disk.fill()
    for other in (["--fresh"], ["--rdzv-endpoint", str(drill.folder / "elsewhere")]):
        refused = drill.start(*options, *other, env=disk.env)
        refused.ends_with(2)
        assert "is in use: a group in c10d at" in refused.output.splitlines()[-1]
    disk.free()
    drill.open(8)
    first.ends_with(0)

    drill.is_like(undisturbed)


def test_a_run_is_not_set_aside_where_there_is_no_room_for_a_new_one(drill, disk, undisturbed):
    """The same command, without --fresh, then finds it as it was."""
    folder = str(drill.run.local / "below")
    drill.run = RunDir.parse(str(disk.seen / "below"))
    disk.mount("size=6m")
    drill.shut(12)
    first = drill.start("--run-dir", folder, env=disk.env)
    drill.stands(12, ranks=1)
    first.signal(signal.SIGTERM)
    drill.open(12)
    first.ends_with(75)
    disk.fill()
    before = drill.tree()
    fresh = drill.start("--run-dir", folder, "--fresh", env=disk.env)
    fresh.ends_with(2)
    assert "Nothing was set aside: free space there" in fresh.output.splitlines()[-1]
    assert drill.tree() == before
    assert [each.name for each in disk.seen.glob("below*")] == ["below"]
    disk.free()
    drill.start("--run-dir", folder, env=disk.env).ends_with(0)

    drill.is_like(undisturbed)
