"""A node of another run, with other rules or in another directory harms none that trains."""

import shutil

from etcd_servers import free_port

from elastic.rendezvous.group import Group

GROUP = ("--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")
OTHER = ("--global-batch", "16")


def generations(drill):
    return drill.values("generation_started", "world_size", "cause", "restarts")


def test_commands_that_do_not_fit_a_run_change_nothing(drill, undisturbed, recipes):
    """While one node trains: other rules, another place to meet, python alone, and --fresh."""
    first = drill.start_before(6, *GROUP)
    alone = {"ELASTIC_RUN_DIR": drill.run.url}
    c10d = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    differ = "--min-nodes 1 there, 2 here; --max-nodes 2 there, 3 here; --keep-alive 2s there, 4s here"
    refusals = [
        (drill.start("--max-nodes", "3", "--min-nodes", "2", "--keep-alive", "4s"), differ),
        (drill.start(*GROUP, *c10d), "is in use: its nodes meet in dir at"),
        (drill.start_script(recipes / "tiny.py", env=alone), "is in use: its nodes meet in dir at"),
        (drill.start("--fresh"), "is in use"),
    ]
    for agent, says in refusals:
        agent.ends_with(2)
        assert says in agent.output
        assert "logs are in" not in agent.output
    groups = [Group.parse(path.read_bytes()) for path in drill.run.rendezvous.glob("state-*")]
    assert len({node.id for group in groups for node in (*group.members, *group.waiting)}) == 1
    drill.open(6)
    drill.ends_like(undisturbed, first)
    assert generations(drill) == [(1, "start", 0)]


def test_a_node_of_another_run_in_the_same_store_is_refused(drill, drills, undisturbed, tmp_path):
    """Another run directory, with other arguments, with --fresh as well, or with the same command:
    a machine whose directory is not shared.
    """
    where = ("--rdzv-endpoint", str(tmp_path / "meet"))
    first = drill.start_before(6, *GROUP, *where)
    others = [drills(tmp_path / name) for name in ("other", "fresh", "machine")]
    started = [
        (others[0].start(*GROUP, *where, arguments=OTHER), "this group is training another run: tiny.py in"),
        (others[1].start(*GROUP, *where, "--fresh", arguments=OTHER), ""),
        (others[2].start(*GROUP, *where), "the run directory is not shared"),
    ]
    for stranger, says in started:
        stranger.ends_with(2)
        assert says in stranger.output.splitlines()[-1]
    drill.open(6)
    drill.ends_like(undisturbed, first)
    assert generations(drill) == [(1, "start", 0)]
    assert not any(other.events("generation_started") for other in others)


def test_of_two_commands_at_once_one_writes_nothing(drill, undisturbed):
    """Other arguments, and one new run directory. Which of them wins is open."""
    commands = {OTHER: drill.start(arguments=OTHER), (): drill.start()}
    codes = {words: agent.wait() for words, agent in commands.items()}
    assert sorted(codes.values()) == [0, 2], drill.output
    (loser,) = (agent for words, agent in commands.items() if codes[words] == 2)
    assert f"{drill.run.url} holds another run (" in loser.output.splitlines()[-1]
    assert generations(drill) == [(1, "start", 0)]
    if codes[()] == 0:
        drill.is_like(undisturbed)


def test_a_run_never_goes_behind_a_checkpoint_of_its_group(stopped, undisturbed):
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
    stopped.ends_like(undisturbed, stopped.start())
    assert stopped.values("restored", "step")[-1] == (12,)


def test_an_old_copy_of_a_finished_run_is_not_called_finished(drill, undisturbed):
    """The group knows the last step, and the directory does not have it."""
    shutil.copytree(undisturbed.run.local, drill.run.local)
    for path in sorted(drill.run.local.glob("checkpoints/*"))[-2:]:
        shutil.rmtree(path)
    again = drill.start()
    again.ends_with(76)
    assert "the group has committed step 24, and" in again.output
