"""A node of another run, with other rules or in another directory harms none that trains."""

import json
import os
import shutil
import signal

import pytest
from etcd_servers import free_port

from elastic.rendezvous.group import Group

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

GROUP = ("--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")
OTHER = ("--form", "sum")


def nodes_ever_in(drill):
    """Ids of all nodes that any version of the group names, in the run directory's own folder."""
    paths = drill.run.rendezvous.glob("state-*")
    groups = [Group.parse(path.read_bytes()) for path in paths]
    return {node.id for group in groups for node in (*group.members, *group.waiting)}


def c10d():
    return ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")


def generations(drill):
    return drill.values("generation_started", "world_size", "cause", "restarts")


def test_a_node_with_other_rules_is_refused_and_changes_nothing(drill, undisturbed):
    """It differs in each of the three rules, and comes while the group trains."""
    drill.shut(6)
    first = drill.start(*GROUP)
    drill.stands(6, ranks=1)
    other = drill.start("--max-nodes", "3", "--min-nodes", "2", "--keep-alive", "4s")
    other.ends_with(2)
    said = other.output.splitlines()[-1]
    assert "--min-nodes 1 there, 2 here; --max-nodes 2 there, 3 here; --keep-alive 2s there, 4s here" in said
    assert "logs are in" not in other.output
    assert len(nodes_ever_in(drill)) == 1
    drill.open(6)
    first.ends_with(0)

    drill.is_like(undisturbed)
    assert generations(drill) == [(1, "start", 0)]


def test_a_node_of_another_run_in_the_same_store_is_refused(drill, drills, undisturbed, tmp_path):
    """Other arguments and another run directory, and the store of a run that trains."""
    where = c10d()
    other = drills(tmp_path / "other")
    drill.shut(6)
    first = drill.start(*GROUP, *where)
    drill.stands(6, ranks=1)
    stranger = other.start(*GROUP, *where, arguments=OTHER)
    stranger.ends_with(2)
    said = stranger.output.splitlines()[-1]
    assert f"this group is training another run: tiny.py in {drill.run.url} there" in said
    drill.open(6)
    first.ends_with(0)

    drill.is_like(undisturbed)
    assert generations(drill) == [(1, "start", 0)]
    assert not other.events("generation_started")


def test_a_node_whose_run_directory_is_not_shared_is_refused(drill, drills, undisturbed, tmp_path):
    """The same command, on a machine with a directory of its own."""
    where = c10d()
    other = drills(tmp_path / "machine")
    drill.shut(6)
    first = drill.start(*GROUP, *where)
    drill.stands(6, ranks=1)
    second = other.start(*GROUP, *where)
    second.ends_with(2)
    assert "the run directory is not shared" in second.output.splitlines()[-1]
    drill.open(6)
    first.ends_with(0)

    drill.is_like(undisturbed)
    assert generations(drill) == [(1, "start", 0)]


def test_of_two_commands_that_begin_at_once_one_wins_and_one_writes_nothing(drill, undisturbed):
    """Other arguments, and one new run directory. Which of them wins is open."""
    commands = {OTHER: drill.start(arguments=OTHER), (): drill.start()}
    codes = {words: agent.wait() for words, agent in commands.items()}
    assert sorted(codes.values()) == [0, 2], drill.output
    (loser,) = (agent for words, agent in commands.items() if codes[words] == 2)
    assert f"{drill.run.url} holds another run (" in loser.output.splitlines()[-1]
    assert generations(drill) == [(1, "start", 0)]
    if codes[()] == 0:
        drill.is_like(undisturbed)


def test_one_run_directory_has_one_place_to_meet_while_its_nodes_live(drill, undisturbed, recipes):
    """One node meets in the run directory, another in a c10d store, a third needs neither."""
    drill.shut(6)
    first = drill.start(*GROUP)
    drill.stands(6, ranks=1)
    second = drill.start(*GROUP, *c10d())
    second.ends_with(2)
    assert "is in use: its nodes meet in dir at" in second.output.splitlines()[-1]
    alone = drill.start_script(recipes / "tiny.py", env={"ELASTIC_RUN_DIR": drill.run.url})
    alone.ends_with(2)
    assert "is in use: its nodes meet in dir at" in alone.output
    fresh = drill.start("--fresh")
    fresh.ends_with(2)
    assert "is in use" in fresh.output
    drill.open(6)
    first.ends_with(0)

    drill.is_like(undisturbed)
    assert generations(drill) == [(1, "start", 0)]


def test_another_place_is_free_once_all_nodes_are_dead_or_have_left(drill, undisturbed):
    """SIGKILL in the run directory's own folder, then SIGTERM at a c10d store, then the folder."""
    drill.shut(6, 13)
    drill.start(*GROUP, "--save-every", "1steps")
    drill.stands(6, ranks=1)
    drill.agents[0].signal(signal.SIGKILL)
    drill.agents[0].wait()
    second = drill.start(*GROUP, *c10d())
    drill.waits_for(lambda: "watching for" in second.output, "the watch")
    drill.open(6)
    drill.stands(13, ranks=1)
    second.signal(signal.SIGTERM)
    drill.open(13)
    second.ends_with(75)
    third = drill.start(*GROUP)
    third.ends_with(0)

    drill.is_like(undisturbed)
    assert [number for (number,) in drill.values("generation_started", "generation")] == [1, 2, 3]


def test_a_run_never_goes_back_behind_a_checkpoint_that_its_group_knows(stopped, undisturbed):
    """The newest checkpoint is of step 20. The directory that resumes lacks the two newest, as an
    old copy would. Then a person has the group forget them.
    """
    for step in (16, 20):
        shutil.rmtree(stopped.run.local / f"checkpoints/{step:012d}")
    for _ in range(2):
        again = stopped.start()
        again.ends_with(76)
        assert "the group has committed step 20, and" in again.output
        assert "the newest is of step 12." in again.output
        assert stopped.last_step == 20
    shutil.rmtree(stopped.run.rendezvous)
    stopped.start().ends_with(0)

    stopped.is_like(undisturbed)
    assert stopped.values("restored", "step")[-1] == (12,)


def test_a_stranger_in_the_old_name_of_a_moved_directory_ends_no_training(drill, undisturbed):
    """It is moved in step 6. Strangers in the old name are refused; the same command joins, and
    commits go on.
    """
    drill.shut(6)
    first = drill.start(*GROUP)
    drill.stands(6, ranks=1)
    drill.run.local.rename(drill.folder / "moved")
    drill.waits_for(lambda: list(drill.run.local.glob("place/*")), "the place in the old name")
    for options, says in (((), "holds another run"), (("--fresh",), "is in use")):
        stranger = drill.start(*options, arguments=OTHER)
        stranger.ends_with(2)
        assert says in stranger.output.splitlines()[-1]
    second = drill.start(*GROUP)
    drill.waits_for(lambda: "a node is waiting to join" in first.output, "the request of a drain")
    drill.open(6)
    for agent in (first, second):
        agent.ends_with(0)
    record = json.loads(max(drill.run.local.glob("checkpoints/*/COMMIT.json")).read_bytes())
    assert (record["step"], record["digest"]) == (24, undisturbed.digest)


def test_a_run_that_is_set_aside_while_it_sleeps_is_fenced(drill, undisturbed):
    """All its processes stop for longer than their place lasts, and --fresh begins a new run in the
    directory. The sleeper wakes and finds itself in another run's directory.
    """
    drill.shut(6, 12)
    sleeper = drill.start("--save-every", "2steps")
    drill.stands(6, ranks=1)
    asleep = drill.processes_of(sleeper)
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    drill.open(6)
    fresh = drill.start("--fresh")
    drill.stands(12, ranks=1)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    assert sleeper.wait() in (1, 2, 75)
    drill.open(12)
    fresh.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("generation_started", "generation") == [(3,)]


def test_an_old_copy_of_a_finished_run_is_not_called_finished(drill, undisturbed, tmp_path):
    """The group, which lies elsewhere, knows the last step; the directory does not have it."""
    where = "--rdzv-endpoint", str(tmp_path / "meet")
    drill.start(*where).ends_with(0)
    for path in sorted(drill.run.local.glob("checkpoints/*"))[-2:]:
        shutil.rmtree(path)
    again = drill.start(*where)
    again.ends_with(76)
    assert f"the group has committed step {drill.last_step}, and" in again.output


def test_two_directories_of_one_name_in_one_etcd_are_two_groups(drill, drills, etcd, undisturbed, tmp_path):
    """Both are called `run`, and both train the same. One directory by two names is one group."""
    where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints)
    other = drills(tmp_path / "other")
    drill.shut(6, 13)
    first = drill.start(*GROUP, *where)
    drill.stands(6, ranks=1)
    other.start(*GROUP, *where).ends_with(0)
    mounted = drill.folder / "mounted elsewhere"
    mounted.symlink_to(drill.run.local)
    second = drill.start(*GROUP, *where, "--run-dir", str(mounted))
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    drill.stands(13, ranks=2)
    drill.open(13)
    for agent in (first, second):
        agent.ends_with(0)

    drill.is_like(undisturbed)
    other.is_like(undisturbed)
    assert generations(drill) == [(1, "start", 0), (2, "node joined", 0)]
    assert generations(other) == [(1, "start", 0)]


def test_a_stranger_with_fresh_ends_no_generation_of_another_run(drill, drills, undisturbed, tmp_path):
    """Both name the same rendezvous folder, and each has a run directory of its own."""
    where = "--rdzv-endpoint", str(tmp_path / "meet")
    drill.shut(6)
    first = drill.start(*GROUP, *where)
    drill.stands(6, ranks=1)
    stranger = drills(tmp_path / "other").start(*GROUP, *where, "--fresh", arguments=OTHER)
    stranger.ends_with(2)
    drill.open(6)
    first.ends_with(0)

    drill.is_like(undisturbed)
    assert generations(drill) == [(1, "start", 0)]


def test_a_damaged_checkpoint_that_the_group_knows_is_no_missing_one(stopped, undisturbed):
    """It is there and refused, and the one before it is used, as ever."""
    for path in stopped.run.local.glob("checkpoints/000000000020/*/state.safetensors"):
        path.write_bytes(b"torn")
    stopped.start().ends_with(0)

    stopped.is_like(undisturbed)
    assert stopped.values("restored", "step")[-1] == (16,)
