"""Groups whose state is outside the run directory: whichever part dies, the result is the same."""

import os
import signal
import socket

import pytest
from etcd_servers import EtcdServers, free_port

from elastic.rendezvous.backends.host import HostBackend

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

OPTIONS = ("--max-nodes", "2", "--last-call", "10min", "--max-restarts", "0", "--snapshot-every", "1")


def test_etcd_that_lost_its_data_costs_no_step(drill, drills, undisturbed, tmp_path):
    """It is away for a moment, and comes back empty. The agent says so, a second node is refused
    with what to do, and a node that is told to leave loses nothing: 436 steps were lost. A run in
    another directory has its own group in the same etcd; one directory by two names has one.
    """
    (tmp_path / "etcd").mkdir()
    servers = EtcdServers(tmp_path / "etcd")
    try:
        drill.shut(6, 13)
        where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", servers.endpoints, "--max-nodes", "2")
        where += ("--last-call", "0s", "--grace", "14s")
        drills(tmp_path / "other").start(*where).ends_with(0)
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
        mounted = drill.folder / "mounted elsewhere"
        mounted.symlink_to(drill.run.local)
        sooner = {"DRILL_SHORTER": "elastic.rendezvous.meeting_place.START_S=4"}
        refused = drill.start(*where, "--run-dir", str(mounted), env=sooner)
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


def test_with_c10d_a_lost_host_ends_the_run_with_all_saved(drill, undisturbed):
    """Instead of the store a process listens that never answers, like a frozen host. Both nodes
    finish what they can without it.
    """
    port = free_port()
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-timeout", "10s")
    drill.shut(10)
    host = HostBackend(f"127.0.0.1:{port}", "unused")
    host.shown()
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
    host.shown()
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
