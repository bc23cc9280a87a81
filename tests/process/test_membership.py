"""A node that joins, leaves or dies changes the world size, and nothing else."""

import json
import os
import shutil
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

GROUP = ("--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")


def test_a_second_terminal_joins_and_leaves_and_no_step_is_lost(drill, undisturbed):
    """No restart is allowed, so a change of membership that counted as one would end the run."""
    drill.shut(6, 13)
    first = drill.start(*GROUP)
    drill.stands(6, ranks=1)
    second = drill.start(*GROUP, "--nproc-per-node", "2")
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    drill.stands(13, ranks=3)
    second.signal(signal.SIGTERM)
    drill.happens("drain_requested", generation=2)
    drill.open(13)
    second.ends_with(75)
    first.ends_with(0)

    drill.is_like(undisturbed)
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(1, "start", 0), (3, "node joined", 0), (1, "node left", 0)]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (6, 0), (13, 0)]


def test_a_spare_takes_over_from_a_node_that_leaves_and_no_step_is_lost(drill, undisturbed):
    """One node may train, and another waits. No checkpoint is due: the state of step 10 is in the
    memory of the node that leaves alone. The uploader stands still (SIGSTOP) until the spare has
    noticed that its turn comes, and the spare still waits for the save.
    """
    alone = ("--max-nodes", "1", "--save-every", "1000steps", "--max-restarts", "0")
    drill.shut(10)
    first = drill.start(*alone)
    drill.stands(10, ranks=1)
    spare = drill.start(*alone)
    drill.waits_for(lambda: "is open without me" in spare.output, "the spare waits")
    drill.uploader_serves(first)
    uploader = drill.uploader_of(first)
    os.kill(uploader, signal.SIGSTOP)
    first.signal(signal.SIGTERM)
    drill.happens("drain_requested", generation=1)
    drill.open(10)
    drill.waits_for(
        lambda: "or to save what they leave behind" in spare.output, "the spare waits for the save"
    )
    os.kill(uploader, signal.SIGCONT)
    first.ends_with(75)
    assert "step 10 is saved" in first.output.splitlines()[-1]
    spare.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("restored", "step", "lost_steps", "source") == [(0, 0, "none"), (10, 0, "checkpoint")]


# SIGTERM comes when this agent has opened the store of the second generation that it forms.
LEAVES_BETWEEN = """
import os, signal
from elastic import cli
from elastic.agent.store_socket import StoreSockets

open_store, opened = StoreSockets.open, []

def open_and_leave(host):
    opened.append(open_store(host))
    if len(opened) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return opened[-1]

StoreSockets.open = open_and_leave
cli.command()
"""


def test_a_node_that_leaves_as_a_newcomer_is_let_in_loses_no_step(drill, undisturbed, tmp_path):
    """The generation with both is formed, and the node that has the state has not entered it. No
    checkpoint is due: the state of step 6 is in its memory alone, and the other has none.
    """
    script = tmp_path / "leaves_between.py"
    script.write_text(LEAVES_BETWEEN)
    rarely = (*GROUP, "--save-every", "1000steps")
    drill.shut(6)
    first = drill.command(drill._command(rarely), {"DRILL_SCRIPT": str(script)})
    drill.stands(6, ranks=1)
    second = drill.start(*rarely)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    first.ends_with(75)
    assert "step 6 is saved" in first.output.splitlines()[-1]
    second.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("restored", "step", "lost_steps", "source") == [(0, 0, "none"), (6, 0, "checkpoint")]


ALONE = ("--max-nodes", "1", "--save-every", "1000steps", "--max-restarts", "0")


def waiting_spares(drill, number, *options):
    """Spares in the order in which they came."""
    spares = []
    for _ in range(number):
        spares.append(drill.start(*options))
        drill.waits_for(lambda: "is open without me" in spares[-1].output, "the spare waits")
    return spares


def all_wait_for_the_save(drill, spares):
    drill.waits_for(
        lambda: all("or to save what they leave behind" in spare.output for spare in spares),
        "the spares wait for the save",
    )


@pytest.mark.parametrize("moment", ["while it waits", "when its generation has formed"])
def test_a_spare_that_dies_in_the_handover_costs_no_step(drill, undisturbed, moment):
    """Two spares wait, and the one whose turn it is dies: before the node that leaves has saved its
    state, or with a generation of its own that no worker has begun. The other takes over.
    """
    drill.shut(10)
    first = drill.start(*ALONE)
    drill.stands(10, ranks=1)
    dies = ("--faults", "generation 2 node 0 rendezvous: kill") if moment.startswith("when") else ()
    doomed, other = waiting_spares(drill, 1, *ALONE, *dies) + waiting_spares(drill, 1, *ALONE)
    drill.uploader_serves(first)
    uploader = drill.uploader_of(first)
    os.kill(uploader, signal.SIGSTOP)
    first.signal(signal.SIGTERM)
    drill.happens("drain_requested", generation=1)
    drill.open(10)
    all_wait_for_the_save(drill, [doomed, other])
    if not dies:
        doomed.signal(signal.SIGKILL)
    os.kill(uploader, signal.SIGCONT)
    first.ends_with(75)
    assert "step 10 is saved" in first.output.splitlines()[-1]
    other.ends_with(0)
    assert doomed.wait() == -signal.SIGKILL

    drill.is_like(undisturbed)
    assert drill.values("restored", "step", "lost_steps", "source") == [(0, 0, "none"), (10, 0, "checkpoint")]


def test_all_members_leave_at_once_while_spares_wait_and_no_step_is_lost(drill, undisturbed):
    """A zone of two nodes goes away. The state of step 10 is in their memories alone, and both
    uploaders stand still until the spares have noticed that their turn comes.
    """
    zone = ("--max-nodes", "2", "--save-every", "1000steps", "--max-restarts", "0")
    drill.shut(10)
    members = [drill.start(*zone, "--last-call", "10min") for _ in range(2)]
    drill.stands(10, ranks=2)
    spares = waiting_spares(drill, 2, *zone)
    for member in members:
        drill.uploader_serves(member)
    uploaders = [drill.uploader_of(member) for member in members]
    for uploader in uploaders:
        os.kill(uploader, signal.SIGSTOP)
    for member in members:
        member.signal(signal.SIGTERM)
    drill.waits_for(lambda: len(drill.events("drain_requested")) == 2, "both drains")
    drill.open(10)
    all_wait_for_the_save(drill, spares)
    for uploader in uploaders:
        os.kill(uploader, signal.SIGCONT)
    for member in members:
        member.ends_with(75)
        assert "step 10 is saved" in member.output.splitlines()[-1]
    for spare in spares:
        spare.ends_with(0)

    drill.is_like(undisturbed)
    restored = drill.values("restored", "step", "lost_steps", "source")
    assert restored[:2] == [(0, 0, "none"), (10, 0, "checkpoint")]
    assert all(lost == 0 for _, lost, _ in restored)


def test_a_spare_goes_on_from_the_checkpoint_where_the_grace_ends_before_the_save(drill, undisturbed):
    """The uploader of the node that leaves stands still for good. It says which step is saved, and
    holds up the spare no longer than its grace.
    """
    options = ("--max-nodes", "1", "--max-restarts", "0", "--grace", "10s")
    drill.shut(5, 10)
    first = drill.start(*options)
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(10, ranks=1)
    drill.happens("checkpoint_committed", step=8)
    (spare,) = waiting_spares(drill, 1, *options)
    drill.shut(9)  # a newer checkpoint of the spare would count as well
    os.kill(drill.uploader_of(first), signal.SIGSTOP)
    first.signal(signal.SIGTERM)
    drill.happens("drain_requested", generation=1)
    drill.open(10)
    first.ends_with(1)
    assert "after step 10, but step 8 is the newest that is saved" in first.output
    drill.open(9)
    spare.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (8, 2)]


@pytest.mark.parametrize("backend", ["dir", "etcd"])
def test_the_node_of_rank_0_dies_and_the_other_goes_on(drill, undisturbed, backend, request):
    """SIGKILL to the agent of rank 0, which has the generation's store; only its silence tells.

    The group's state is in the run directory, or in etcd.
    """
    where = []
    if backend == "etcd":
        endpoints = request.getfixturevalue("etcd").endpoints
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints, "--rdzv-id", drill.folder.name]
    drill.shut(10)
    drill.start_two("--max-restarts", "0", "--snapshot-every", "1", *where)
    drill.stands(10, ranks=2)
    doomed, other = drill.agents_of_ranks_0_and_1()
    doomed.signal(signal.SIGKILL)
    drill.happens("generation_started", generation=2)
    drill.open(10)
    other.ends_with(0)

    drill.is_like(undisturbed)
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(2, "start", 0), (1, "node lost", 0)]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (9, 0)]


def test_a_paused_node_is_evicted_and_joins_again_when_it_resumes(drill, undisturbed):
    """Node 0 stops itself and all its processes, as a paused container.

    The other node trains alone and admits it again.
    """
    drill.shut(10, 14)
    pauses = ("--faults", "step 9 node 0: pause 8s")
    agents = drill.start_two("--max-restarts", "0", "--snapshot-every", "1", *pauses)
    paused, _ = drill.agents_of_ranks_0_and_1()
    drill.waits_for((drill.gates / "at-10-rank1").exists, "rank 1 before step 10")
    drill.happens("restored", generation=2, step=9, lost_steps=0)
    drill.open(10)
    drill.happens("drain_requested", generation=2, reason="a node is waiting to join")
    drill.open(14)
    for agent in agents:
        agent.ends_with(0)

    drill.is_like(undisturbed)
    generations = drill.values("generation_started", "world_size", "cause")
    assert generations == [(2, "start"), (1, "node lost"), (2, "node joined")]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (9, 0), (14, 0)]
    fault, joined = drill.happens("fault_injected"), drill.happens("generation_started", generation=3)
    assert joined["time"] - fault["time"] >= 8.0
    assert "a newer generation exists, and this node is not in it" in paused.output


@pytest.mark.parametrize("is_emptied", [True, False], ids=["emptied", "removed"])
def test_a_rendezvous_folder_that_is_emptied_during_training_is_restored(drill, undisturbed, is_emptied):
    """The files are removed in step 10, or the folder with them.

    A node that comes afterwards still finds the group.
    """
    drill.shut(10)
    first = drill.start(*GROUP)
    drill.stands(10, ranks=1)
    if is_emptied:
        for path in drill.run.rendezvous.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    else:
        # In one operation: a live node writes into it all the time.
        drill.run.rendezvous.rename(drill.folder / "removed")
    drill.waits_for(lambda: list(drill.run.rendezvous.glob("state-*")), "the group's state")
    second = drill.start(*GROUP)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(10)
    for agent in (first, second):
        agent.ends_with(0)

    drill.is_like(undisturbed)
    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(1, "start", 0), (2, "node joined", 0)]
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (10, 0)]


def test_a_machine_whose_workers_die_before_its_agent_uses_up_no_restart(drill, undisturbed):
    """No restart is allowed. The agent of a killed worker would end the run, and is killed while it
    waits to see whether a machine is gone.
    """
    drill.shut(10)
    limits = ("--max-restarts", "0", "--snapshot-every", "1", "--keep-alive", "6")
    drill.start_two(*limits)
    drill.stands(10, ranks=2)
    other, doomed = drill.agents_of_ranks_0_and_1()
    os.kill(drill.pid_of_rank(1, generation=1), signal.SIGKILL)
    drill.happens("generation_ended", generation=1, cause="rank 1 ended with signal 9")
    doomed.signal(signal.SIGKILL)
    drill.happens("generation_started", generation=2, cause="node lost", restarts=0)
    drill.open(10)
    other.ends_with(0)
    drill.is_like(undisturbed)


def test_a_run_directory_that_is_moved_is_said_and_training_goes_on(drill, undisturbed):
    """It is renamed in step 10. The last state is saved under the old name.

    A save that is due while another one is under way comes later: step 5 waits for that of step 4.
    """
    drill.shut(5, 10)
    agent = drill.start()
    drill.happens("checkpoint_committed", step=4)
    drill.open(5)
    drill.stands(10, ranks=1)
    drill.happens("checkpoint_committed", step=8)
    drill.run.local.rename(drill.folder / "moved")
    drill.waits_for(lambda: "was moved, replaced or removed" in agent.output, "the sentence")
    drill.open(10)
    agent.ends_with(0)

    assert agent.output.count("was moved, replaced or removed") == 1
    code, found = drill.inspects("verify", drill.run.url)
    assert code == 0 and found["damage"] == []
    record = json.loads(max(drill.run.local.glob("checkpoints/*/COMMIT.json")).read_bytes())
    assert (record["step"], record["digest"]) == (24, undisturbed.digest)


def test_a_node_that_sleeps_until_the_run_is_complete_says_so_and_records_nothing(drill, undisturbed):
    """The node of rank 0 stops with all its processes, and the other one trains to the end. The
    sleeper had rank 0 in the last generation that it knows.
    """
    drill.shut(6)
    drill.start_two()
    drill.stands(6, ranks=2)
    sleeper, other = drill.agents_of_ranks_0_and_1()
    asleep = drill.processes_of(sleeper)
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    drill.open(6)
    other.ends_with(0)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    sleeper.ends_with(0)

    assert sleeper.output.splitlines()[-1].startswith("complete: 24 steps, digest ")
    drill.is_like(undisturbed)
