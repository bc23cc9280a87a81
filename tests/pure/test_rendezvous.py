"""Rendezvous objects on a real folder, each node in a thread; then torch's handler over them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
from gates import wait_for
from torch.distributed.elastic import rendezvous

from elastic.errors import UsageError
from elastic.rendezvous import torchrun, transitions
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Group, Node, RunEnd, RunKey
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.rendezvous.store_socket import StoreSockets
from elastic.rendezvous.torchrun import ElasticRendezvous, creator
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock, MemoryBackend

PAIR = GroupPolicy(min_nodes=2, max_nodes=2, last_call_s=0.0, timeout_s=120.0)
ALONE = GroupPolicy(min_nodes=1, max_nodes=1, last_call_s=0.0, timeout_s=120.0)
KEEP_ALIVE_S = 60.0
SHORT_S = 0.05  # a keep-alive with a heartbeat every 10 ms


def never():
    return False


class FaultyBackend(MemoryBackend):
    """Fails as the test wants.

    is_away: reads fail. beat_error: what heartbeats raise. beaten: set by each heartbeat.
    """

    def __init__(self):
        super().__init__()
        self.is_away = False
        self.beat_error = None
        self.beaten = threading.Event()

    def read(self):
        if self.is_away:
            raise BackendFailed("away")
        return super().read()

    def show(self, node_id, text):
        if self.beat_error is not None:
            raise self.beat_error
        super().show(node_id, text)
        self.beaten.set()


@pytest.fixture
def lone():
    """Makes the one node of a run, if the policy is not another one; all are stopped at the end."""
    made = []

    def make(backend, name="a", nproc=1, *, policy=ALONE, **options):
        given = {"keep_alive_s": KEEP_ALIVE_S, "clock": SystemClock(), "open_endpoint": lambda: "a:1"}
        node = Node(id=name, address=name, nproc=nproc)
        made.append(Rendezvous(backend, node, policy, **given | options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.mark.parametrize(("has_begun", "cause"), [(None, transitions.RESUME), (False, transitions.START)])
def test_a_group_whose_state_was_lost_counts_generations_on(lone, has_begun, cause):
    """The run directory shows generation 4, the backend nothing; with --fresh they are those of a
    run that was set aside.
    """
    generation = lone(FaultyBackend(), min_generation=4, has_begun=has_begun).join(never)
    assert (generation.number, generation.cause) == (5, cause)


def test_a_new_run_under_an_old_name_counts_generations_on(lone):
    """The old run is complete: it would stop here, and a new one begins. A run that has not ended
    is left alone.
    """
    backend = FaultyBackend()
    a = lone(backend)
    a.join(never)
    assert a.reopen(is_new=True) is None
    assert a.watch().open
    a.done()
    assert a.reopen() == RunEnd(exit_code=0, reason="complete")
    assert a.reopen(is_new=True) is None
    generation = lone(backend).join(never)
    assert (generation.number, generation.cause) == (3, transitions.START)


def test_heartbeats_survive_a_failing_backend(lone):
    """The first three fail, and later ones, with an error that no contract names; then the thread
    must send them again.
    """
    reported = []
    backend, tries = FaultyBackend(), iter(range(10**9))
    backend.beat_error = BackendFailed("away")

    def comes_back():
        if next(tries) == 3:
            backend.beat_error = None
        return False

    lone(backend, keep_alive_s=SHORT_S, notify=reported.append).join(comes_back)
    backend.beat_error = OSError("disk full")
    wait_for(lambda: any("heartbeat failed: disk full" in line for line in reported), "its failure")
    backend.beaten.clear()
    backend.beat_error = None
    assert backend.beaten.wait(timeout=60)


def test_an_unreachable_backend_ends_the_wait_after_the_timeout(lone):
    """Every read fails."""
    backend, clock = FaultyBackend(), FakeClock()
    backend.is_away, began_s = True, clock.now
    with pytest.raises(BackendFailed):
        lone(backend, clock=clock).join(never)
    assert ALONE.timeout_s <= clock.now - began_s < ALONE.timeout_s + 2.0


def handler_of(lone, backend, *endpoints, **node):
    """A node that names these as the stores of its first generations, and then serves its own."""
    left, sockets = list(endpoints), StoreSockets("127.0.0.1")
    rendezvous = lone(backend, open_endpoint=lambda: left.pop(0) if left else sockets.open(), **node)
    return ElasticRendezvous(rendezvous, sockets, run_id="r")


def test_a_launcher_ends_the_run_also_for_who_comes_too_late(lone):
    """Of two nodes one has finished and left, which is a reason to restart, and no end."""
    backend = MemoryBackend()
    a, b, late = (handler_of(lone, backend, name=name, policy=PAIR) for name in "abc")
    with ThreadPoolExecutor(2) as pool:
        infos = [*pool.map(ElasticRendezvous.next_rendezvous, (a, b))]
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
    assert a.num_nodes_waiting() == 0
    a._rendezvous.done()
    assert b._rendezvous.watch().open
    a.shutdown()
    assert b.num_nodes_waiting() == 1 and not b.is_closed()
    b.set_closed()
    assert b.is_closed()
    with pytest.raises(rendezvous.RendezvousClosedError):
        late.next_rendezvous()


def test_a_place_that_fails_with_a_store_ends_no_agent(lone):
    """With c10d one machine may serve both. The place to meet is back a moment later."""
    backend = FaultyBackend()
    handler = handler_of(lone, backend, "127.0.0.1:1")
    open_store, failures = handler._open_store, []

    def opening(endpoint):
        if endpoint != "127.0.0.1:1":
            return open_store(endpoint)
        backend.is_away = True
        raise RuntimeError("connection refused")

    def notify(reason):
        if reason == "away":
            failures.append(reason)
            backend.is_away = False

    handler._open_store = opening
    handler._rendezvous._notify_once = notify
    handler.next_rendezvous()
    assert failures and handler.generation is not None and handler.generation.number == 2


def test_a_node_whose_stores_stay_out_of_reach_says_why(lone, monkeypatch):
    """It may be the fault of its own descriptors, and not of the addresses."""
    error = RuntimeError("errno: 24 - Too many open files\nframe 0")
    monkeypatch.setattr(torchrun, "TCPStore", Mock(side_effect=error))
    handler = handler_of(lone, FaultyBackend(), *["127.0.0.1:1"] * 3)
    with pytest.raises(rendezvous.RendezvousConnectionError, match=r"Too many open files\)"):
        handler.next_rendezvous()


def test_a_close_that_meets_an_outage_is_made_at_the_next_join(lone):
    """The place to meet does not answer as the generation is closed, and answers again after it."""
    backend = FaultyBackend()
    a = lone(backend)
    a.join(never)
    backend.is_away = True
    with pytest.raises(BackendFailed):
        a.close(transitions.FAILURE, step=0, counts=True)
    backend.is_away = False
    found = a.join(never)
    assert (found.number, found.cause, found.restarts) == (2, transitions.FAILURE, 1)


def test_no_node_is_dead_while_this_one_can_send_no_heartbeat(lone):
    """The disk is full for a long while and has room again; then one node does fall silent."""
    clock = FakeClock()
    a = lone(MemoryBackend(), clock=clock, policy=PAIR, keep_alive_s=2.0)
    group = Group(waiting=(Node(id="b", address="b", nproc=1),), settings=a._observer.settings)
    a.backend.compare_and_set(None, group.to_json())
    for problem in ("no space left", ""):
        a._heartbeat.problem = problem
        for _ in range(40):
            clock.sleep(0.5)
            a.watch()
        assert ("b" in a._observer.alive) == bool(problem)


def test_settings_of_a_dead_node_refuse_no_other(lone):
    """It has another keep-alive. While it lives, the newcomer is refused: test_strangers.py."""
    backend, clock = MemoryBackend(), FakeClock()
    a = lone(backend, clock=clock, keep_alive_s=2.0)
    theirs = replace(a._observer.settings, keep_alive_s=3.0)
    group = Group(waiting=(Node(id="b", address="b", nproc=1),), settings=theirs)
    backend.compare_and_set(None, group.to_json())
    began_s = clock.now
    a.start()
    assert clock.now - began_s > 3.0
    assert backend.history() == [group.to_json()]


def test_the_end_of_another_runs_group_is_not_this_nodes(lone):
    """This node was frozen while that one took the place over, and completed."""
    backend = MemoryBackend()
    a = lone(backend)
    a.join(never)
    theirs = replace(a._observer.settings, run=RunKey(run_id="another"))
    ended = Group(generation=9, settings=theirs, ended=RunEnd(exit_code=0, reason="complete"))
    backend.compare_and_set(a._observer.poll()[0], ended.to_json())
    found = a.watch()
    assert found.fenced and found.ended is None


def test_torchrun_options_reach_the_policy(tmp_path):
    """The wait for a second node ends after the join_timeout of --rdzv-conf. No endpoint is a usage
    error.
    """
    make = creator()
    options = {"local_addr": "127.0.0.1", "join_timeout": "0.01"}
    handler = make(rendezvous.RendezvousParameters("elastic", str(tmp_path), "run/1", 2, 2, **options))
    assert handler.get_backend() == "elastic" and handler.get_run_id() == "run/1" and handler.use_agent_store
    with pytest.raises(rendezvous.RendezvousTimeoutError, match="1 of at least 2"):
        handler.next_rendezvous()
    assert handler.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["run%2F1"]
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        make(rendezvous.RendezvousParameters("elastic", "", "r", 1, 1))
