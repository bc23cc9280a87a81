"""The contract of a rendezvous backend, kept by every implementation."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count

import pytest
from etcd_servers import end_stores, free_port
from scale_servers import Bucket, Etcd, Store, Traffic, folder

from elastic.errors import StoreFailed
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.backends.etcd import EtcdBackend
from elastic.rendezvous.backends.host import HostBackend
from elastic.rendezvous.backends.object_store import ObjectStoreBackend
from elastic.testing.fakes import FakeClock, MemoryBackend


@pytest.fixture(params=["memory", "directory", "etcd", "c10d", "objects"])
def open_backend(request, monkeypatch):
    """Each call opens another node's view of the same state, if the backend has several."""
    for limit in ("host.CONNECT_S", "etcd.ANSWER_S"):  # a call takes as long as the machine is busy
        monkeypatch.setattr(f"elastic.rendezvous.backends.{limit}", 100.0)
    shared = MemoryBackend()
    opened = []

    def c10d():
        # The first one serves the store.
        opened.append(HostBackend(f"127.0.0.1:{port}", "a group/name"))
        opened[-1].read()
        return opened[-1]

    match request.param:
        case "memory":
            yield lambda: shared
        case "directory":
            yield lambda: DirectoryBackend(request.getfixturevalue("tmp_path"))
        case "etcd":
            servers, group = request.getfixturevalue("etcd"), uuid.uuid4().hex
            yield lambda: EtcdBackend(servers.endpoints, f"a group/{group}", {})
        case "c10d":
            port = free_port()
            yield c10d
        case "objects":
            bucket = request.getfixturevalue("s3_bucket")
            yield lambda: ObjectStoreBackend(f"{bucket}/run/rendezvous", state_s=0.0, beats_s=0.0)
    end_stores(*opened)


def test_only_a_writer_of_the_newest_version_replaces_it(open_backend):
    """There is none, and a writer names one; another one believes then that there is none, and
    holds the older version after that.
    """
    ours, theirs = open_backend(), open_backend()
    assert ours.read() is None and not ours.compare_and_set(3, b"x") and ours.read() is None
    assert ours.compare_and_set(None, b"one")
    assert not theirs.compare_and_set(None, b"one"), "an equal value is another write"
    first = theirs.read()
    assert first is not None and first[1] == b"one"
    assert ours.compare_and_set(first[0], b"two")
    assert not theirs.compare_and_set(first[0], b"late")
    second = theirs.read()
    assert second is not None and second[0] > first[0] and second[1] == b"two"


def test_of_racing_writers_exactly_one_wins_each_version(open_backend):
    """Six threads, released together, try to succeed the same version, again and again: less often
    where each call is several requests to a server of HTTP.
    """
    backends = [open_backend() for _ in range(6)]
    rounds = 6 if isinstance(backends[0], ObjectStoreBackend) else 30
    barrier = threading.Barrier(len(backends))
    wins = []

    def race(me):
        for round_ in range(rounds):
            barrier.wait(timeout=60)
            found = backends[me].read()
            barrier.wait(timeout=60)
            value = f"{round_} {me}".encode()
            if backends[me].compare_and_set(None if found is None else found[0], value):
                wins.append((round_, value))

    with ThreadPoolExecutor(len(backends)) as pool:
        list(pool.map(race, range(len(backends))))
    assert [round_ for round_, _ in wins] == list(range(rounds))
    newest = backends[0].read()
    assert newest is not None and newest[1] == wins[-1][1]


def test_the_newest_text_of_each_node_is_shown(open_backend):
    """A node whose id looks like a path shows three; few or many of forty more are asked for, one
    of which does not exist.
    """
    ours, theirs = open_backend(), open_backend()
    assert not ours.shown()
    for text in ("1", "2 join 1 ::1/x, a", "3"):
        ours.show("../node a,b", text)
        assert theirs.shown() == {"../node a,b": text}
    nodes = [f"n{number}" for number in range(40)]
    for node in nodes:
        ours.show(node, "1")
    assert theirs.shown([*nodes[:30], "absent"]) == dict.fromkeys(nodes[:30], "1")
    assert theirs.shown([]) == {}
    ours.show("n7", "2")
    assert theirs.shown(["n7", "n8", "absent"]) == {"n7": "2", "n8": "1"}


class FailingTraffic(Traffic):
    """One of the calls to come fails. is_lost: it takes effect all the same."""

    fails_in, is_lost, error = 0, False, Exception()

    def call(self, kind, seconds, effect):
        self.clock.sleep(seconds)
        self.fails_in -= 1
        if self.fails_in or self.is_lost:
            found = effect()
        if not self.fails_in:
            raise self.error
        return found


def tried(call, *arguments):
    try:
        return call(*arguments)
    except BackendFailed:
        return BackendFailed


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(
    ("server", "error"),
    [(None, OSError("I/O")), (Etcd, BackendFailed()), (Store, BackendFailed()), (Bucket, StoreFailed())],
)
def test_a_call_that_fails_says_so_and_is_no_half_call(server, error, is_lost, tmp_path):
    """Each call of a client to its server fails once: what it did is there as a whole or not at
    all, and where it raised no error it said what is so. The calls after it make up for it.
    """
    for fails_in in count(1):
        traffic = FailingTraffic(FakeClock())
        path = tmp_path / str(fails_in)
        with folder(traffic, path) if server is None else nullcontext(server(traffic).open) as open_backend:
            ours, theirs = opened = open_backend(), open_backend()
            for each in opened:
                each._state_s = each._beats_s = 0.0  # an object store is asked each time
            assert ours.compare_and_set(None, b"old")
            ours.show("a", "1")
            old = ours.read()
            traffic.error, traffic.is_lost, traffic.fails_in = error, is_lost, fails_in
            read = tried(ours.read)
            is_set, is_shown = tried(ours.compare_and_set, old[0], b"new"), tried(ours.show, "a", "2")
            shown = tried(ours.shown)
            if traffic.fails_in > 0:
                assert fails_in > 4
                return
            there = theirs.read()
            texts = theirs.shown()
            assert read in (BackendFailed, old) and shown in (BackendFailed, texts)
            assert there[1] == b"new" or (there == old and is_set is not True)
            assert texts == {"a": "2"} or (texts == {"a": "1"} and is_shown is BackendFailed)
            traffic.clock.sleep(0.5)  # an object store is not asked again before
            assert there != old or (ours.read() == old and ours.compare_and_set(old[0], b"new"))
            ours.show("a", "3")
            there = ours.read()
            assert there == theirs.read() and there[1] == b"new"
            assert ours.shown() == theirs.shown() == {"a": "3"}
