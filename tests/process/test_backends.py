"""Groups whose state is outside the run directory: whichever part dies, the result is the same."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from etcd_servers import EtcdServers, free_port

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.host import HostBackend

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

OPTIONS = ("--max-nodes", "2", "--last-call", "10min", "--max-restarts", "0", "--snapshot-every", "1")


def test_without_etcd_steps_go_on(drill, undisturbed, tmp_path):
    """SIGKILL to the only member while all ranks wait before a step. Two checkpoints later a worker
    is killed; then etcd is back.
    """
    (tmp_path / "etcd").mkdir()
    servers = EtcdServers(tmp_path / "etcd")
    try:
        drill.shut(6, 14)
        where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", servers.endpoints)
        agent = drill.start("--snapshot-every", "1", *where)
        drill.stands(6, ranks=1)
        servers.kill(0)
        drill.waits_for(lambda: "training goes on" in agent.output, "the loss being said")
        drill.open(6)
        drill.stands(14, ranks=1)
        os.kill(drill.pid_of_rank(0, generation=1), signal.SIGKILL)
        drill.waits_for(lambda: "this node waits for it" in agent.output, "the wait being said")
        servers.start(0)
        drill.open(14)
        agent.ends_with(0)
        drill.is_like(undisturbed)
    finally:
        servers.close()


def test_etcd_that_lost_its_data_costs_no_step(drill, undisturbed, tmp_path):
    """It is away for a moment, and comes back empty. The agent says so, a second node is refused
    with what to do, and a node that is told to leave loses nothing: 436 steps were lost.
    """
    (tmp_path / "etcd").mkdir()
    servers = EtcdServers(tmp_path / "etcd")
    try:
        drill.shut(6, 13)
        where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", servers.endpoints, "--max-nodes", "2")
        where += ("--last-call", "0s", "--grace", "14s")
        agent = drill.start(*where)
        drill.stands(6, ranks=1)
        servers.kill(0)
        drill.waits_for(lambda: "training goes on" in agent.output, "the loss being said")
        servers.wipe(0)
        servers.start(0)
        servers.wait_ready()
        drill.waits_for(lambda: "it was deleted" in agent.output, "the loss of data being said")
        drill.open(6)
        drill.stands(13, ranks=1)
        refused = drill.start(*where, env={"DRILL_SHORTER": "elastic.rendezvous.meeting_place.START_S=4"})
        refused.ends_with(2)
        assert "has lost their group; stop them" in refused.output
        agent.signal(signal.SIGTERM)
        drill.happens("drain_requested")
        drill.open(13)
        agent.ends_with(75)
        assert "step 13 is saved" in agent.output.splitlines()[-1]
        drill.start(*where).ends_with(0)
        drill.is_like(undisturbed)
        assert drill.values("restored", "step", "lost_steps") == [(0, 0), (13, 0)]
    finally:
        servers.close()


def test_with_c10d_a_survivor_goes_on_without_the_host(drill, undisturbed):
    """SIGKILL to the agent with the store in its memory. The survivor is on the same machine, so
    the address is its own too and it serves a new store there.
    """
    drill.shut(10)
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    host = drill.start(*OPTIONS, *where)
    drill.waits_for(lambda: "waits" in host.output, "the first node in the group")
    other = drill.start(*OPTIONS, *where)
    drill.stands(10, ranks=2)
    host.signal(signal.SIGKILL)
    drill.happens("generation_started", generation=2)
    drill.open(10)
    other.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (9, 0)]


@pytest.mark.parametrize("place", ["c10d", "dir"])
def test_a_group_without_its_state_takes_a_sleeper_back(drill, undisturbed, place):
    """A node stands still; the other one dies with the group's state, comes back,
    and goes on alone in generation 2. The sleeper puts nothing older in its place.
    """
    drill.shut(10, 14)
    where = ("--save-every", "2steps")
    if place == "c10d":
        where += ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    host = drill.start(*OPTIONS, *where)
    drill.waits_for(lambda: "waits" in host.output, "the first node in the group")
    sleeper = drill.start(*OPTIONS, *where)
    drill.stands(10, ranks=2)
    asleep = drill.processes_of(sleeper)
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    host.signal(signal.SIGKILL)
    host.wait()
    if place == "dir":
        shutil.rmtree(drill.run.rendezvous)
    drill.open(10)
    again = drill.start(*OPTIONS, *where, "--last-call", "1s")
    drill.stands(14, ranks=1)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(14)
    for agent in (again, sleeper):
        agent.ends_with(0)

    drill.is_like(undisturbed)
    assert drill.values("generation_started", "generation") == [(1,), (2,), (3,)]
    assert drill.values("generation_started", "world_size") == [(2,), (1,), (2,)]


def test_with_c10d_a_frozen_host_keeps_the_run_directory(drill, undisturbed):
    """Only the host's agent is stopped (SIGSTOP); all workers train. Nobody reaches the store, and
    a command that finds the place silent would take the run directory: 637 steps were lost so.
    """
    drill.shut(10, 14)
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    host = drill.start(*OPTIONS, *where)
    drill.waits_for(lambda: "waits" in host.output, "the first node in the group")
    other = drill.start(*OPTIONS, *where)
    drill.stands(10, ranks=2)
    host.signal(signal.SIGSTOP)
    drill.open(10)
    drill.stands(14, ranks=2)
    for words in ("--fresh",), ():
        refused = drill.start(*words)
        refused.ends_with(2)
        assert "nodes may train in c10d at" in refused.output.splitlines()[-1]
    host.signal(signal.SIGCONT)
    drill.open(14)
    for agent in (host, other):
        agent.ends_with(0)
    drill.is_like(undisturbed)


def test_with_c10d_a_lost_host_ends_the_run_with_all_saved(drill, undisturbed):
    """Instead of the store a process listens that never answers, like a frozen host. Both nodes
    finish what they can without it.
    """
    port = free_port()
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-timeout", "10s")
    drill.shut(10)
    host = HostBackend(f"127.0.0.1:{port}", "unused")
    host.beats()
    env = drill.impatient_uploaders()
    agents = [drill.start(*OPTIONS, *where, env=env) for _ in range(2)]
    drill.stands(10, ranks=2)
    host.close()
    with socket.create_server(("127.0.0.1", port)):
        drill.open(10)
        for agent in agents:
            agent.ends_with(75)
    assert drill.last_step == len(undisturbed.chains)
    back = drill.start("--snapshot-every", "1", *where)
    back.ends_with(0)
    drill.is_like(undisturbed)


def test_with_c10d_a_sleeper_learns_that_the_run_ended(drill, undisturbed):
    """The store ends while the sleeper sleeps, and the run directory alone says how the run did. So
    it does to a node that comes later. Neither waits for --rdzv-timeout, of ten minutes.
    """
    port = free_port()
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    drill.shut(6)
    host = HostBackend(f"127.0.0.1:{port}", "unused")
    host.beats()
    env = drill.impatient_uploaders()
    for _ in range(2):
        drill.start(*OPTIONS, *where, env=env)
    drill.stands(6, ranks=2)
    other, sleeper = drill.agents_of_ranks_0_and_1()
    asleep = drill.processes_of(sleeper)
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    drill.open(6)
    other.ends_with(0)
    host.close()
    with socket.create_server(("127.0.0.1", port)):
        for pid in asleep:
            os.kill(pid, signal.SIGCONT)
        sleeper.ends_with(0)
        late = drill.start(*OPTIONS, *where)
        late.ends_with(0)
    assert sleeper.output.splitlines()[-1].startswith("complete: 24 steps, digest ")
    assert " is finished: 24 steps " in late.output.splitlines()[-1]
    assert len(drill.values("run_finished", "steps")) == 1
    drill.is_like(undisturbed)


HOST = """
import sys
from elastic.rendezvous.backends.host import HostBackend
host = HostBackend(sys.argv[1], "g")
host.beat("host")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_frozen_host_of_the_store_blocks_no_call_for_long():
    """SIGSTOP to the host under a connection whose answer is waited for; then SIGCONT."""
    endpoint = f"127.0.0.1:{free_port()}"
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert host.stdout is not None and host.stdout.readline() == b"ready\n"
        node = HostBackend(endpoint, "g")
        assert node.compare_and_set(None, b"x")
        found = node.read()
        host.send_signal(signal.SIGSTOP)
        # The signal is on its way when kill() returns, and the store's thread may answer once more.
        os.waitpid(host.pid, os.WUNTRACED)
        for call in (node.read, node.beats, lambda: node.beat("n")):
            began = time.monotonic()
            with pytest.raises(BackendFailed, match="should answer within 1 s"):
                call()
            assert time.monotonic() - began < 10
        host.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 60
        while (answer := _answer(node)) is None:
            assert time.monotonic() < deadline
        assert answer == found
        node.beat("n")
        assert set(node.beats()) == {"host", "n"}
    finally:
        host.kill()
        host.communicate()


def _answer(node):
    try:
        return node.read()
    except BackendFailed:
        return None


def test_fresh_sets_aside_a_run_in_etcd_unless_an_agent_is_in_it(drill, etcd):
    """One name in etcd for the run in progress and for the run that takes its place.

    In between the same command finds that the run is finished; at the end a person removes the run
    directory by hand.
    """
    where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints, "--rdzv-id", drill.folder.name)
    drill.shut(6)
    first = drill.start(*where)
    drill.stands(6, ranks=1)
    early = drill.start(*where, "--fresh")
    early.ends_with(2)
    assert "is in use" in early.output
    drill.open(6)
    first.ends_with(0)
    assert not drill.run.rendezvous.exists()
    again = drill.start(*where)
    again.ends_with(0)
    assert "is finished" in again.output
    drill.start(*where, "--fresh").ends_with(0)
    assert [event["generation"] for event in drill.events("generation_started")] == [3]
    drill.run.local.rename(drill.folder / "elsewhere")
    drill.start(*where).ends_with(0)
    assert [event["generation"] for event in drill.events("generation_started")] == [5]
