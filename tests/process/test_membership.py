"""A node that joins, leaves or dies changes the world size, and nothing else."""

import json
import shutil

GROUP = ("--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")


def test_a_second_terminal_joins_and_the_first_one_leaves(drill, undisturbed):
    """No restart is allowed, so a change of membership that counted as one would end the run. The
    other workers do the last step again, and the node that stays commits the leaver's last step: no
    save is due by itself.
    """
    kept = ("--snapshot-every", "1", "--save-every", "1000steps", "--rehearse", "1000", "--audit", "off")
    drill.shut(13)
    first = drill.start_before(6, *GROUP, *kept)
    second = drill.start(*GROUP, *kept, "--nproc-per-node", "2")
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    drill.drains(first, 13, ranks=3)
    # One step more is done before the group changes, to be done again after it.
    assert drill.events("checkpoint_committed", step=14)
    drill.ends_like(undisturbed, second)
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(1, "start", 0), (3, "node joined", 0), (2, "node left", 0)]
    assert drill.values("restored", "lost_steps") == [(0,), (0,), (0,)]
    assert drill.values("overlapped", "verdict") == [("alike",), ("alike",)]


def test_a_rendezvous_folder_emptied_in_training_is_restored(drill, undisturbed):
    """In step 10 the files are removed, and then the folder with them. A node that comes afterwards
    still finds the group.
    """

    def is_restored():
        drill.waits_for(lambda: list(drill.run.rendezvous.glob("state-*")), "the group's state")

    first = drill.start_before(10, *GROUP)
    for path in drill.run.rendezvous.iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    is_restored()
    # In one operation: a live node writes into it all the time.
    drill.run.rendezvous.rename(drill.folder / "removed")
    is_restored()
    second = drill.start(*GROUP)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(10)
    drill.ends_like(undisturbed, first, second)
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(1, "start", 0), (2, "node joined", 0)]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (10, 0)]


def test_a_moved_run_directory_stops_nothing(drill, undisturbed):
    """It is renamed in step 6, and the last state is saved under the old name."""
    agent = drill.start_before(6, *GROUP)
    drill.run.local.rename(drill.folder / "moved")
    drill.open(6)
    agent.ends_with(0)
    code, found = drill.inspects("verify", drill.run.url)
    assert code == 0 and found["damage"] == []
    record = json.loads(max(drill.run.local.glob("checkpoints/*/*/COMMIT.json")).read_bytes())
    assert (record["step"], record["digest"]) == (24, undisturbed.digest)
