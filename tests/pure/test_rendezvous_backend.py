"""The contract of a rendezvous backend, kept by every implementation."""

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from etcd_servers import end_stores, free_port

from elastic.rendezvous.backends import host
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.backends.etcd import EtcdBackend
from elastic.rendezvous.backends.host import HostBackend
from elastic.rendezvous.backends.object_store import ObjectStoreBackend
from elastic.testing.fakes import MemoryBackend

Open = Callable[[], Backend]


@pytest.fixture(params=["memory", "directory", "etcd", "c10d", "objects"])
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Each call opens another node's view of the same state, if the backend has several."""
    shared = MemoryBackend()
    opened: list[HostBackend] = []

    def c10d() -> Backend:
        # The first one serves the store.
        opened.append(HostBackend(f"127.0.0.1:{port}", "a group/name"))
        opened[-1].read()
        return opened[-1]

    match request.param:
        case "memory":
            yield lambda: shared
        case "directory":
            yield lambda: DirectoryBackend(tmp_path / "rendezvous")
        case "etcd":
            servers, group = request.getfixturevalue("etcd"), uuid.uuid4().hex
            yield lambda: EtcdBackend(servers.endpoints, f"a group/{group}", {})
        case "objects":
            bucket = request.getfixturevalue("s3_bucket")
            yield lambda: ObjectStoreBackend(f"{bucket}/run/rendezvous", state_s=0.0, beats_s=0.0)
        case "c10d":
            port = free_port()
            # A connection takes as long as the machine is busy.
            request.getfixturevalue("monkeypatch").setattr(host, "CONNECT_S", 100.0)
            yield c10d
    end_stores(*opened)


def times(backend: Backend, count: int) -> int:
    """How often to repeat a call: less often where each is several requests to a server of HTTP."""
    return count // 5 if isinstance(backend, ObjectStoreBackend) else count


def test_a_fresh_backend_is_empty(open_backend: Open) -> None:
    """A successor of a version that never existed is refused."""
    assert open_backend().read() is None
    assert not open_backend().compare_and_set(3, b"x")
    assert open_backend().read() is None


def test_only_a_writer_of_the_newest_version_replaces_it(open_backend: Open) -> None:
    """Another writer believes that there is none, and then holds the older version."""
    ours, theirs = open_backend(), open_backend()
    assert ours.compare_and_set(None, b"one")
    assert not theirs.compare_and_set(None, b"one"), "an equal value is another write"
    first = theirs.read()
    assert first is not None and first[1] == b"one"
    assert ours.compare_and_set(first[0], b"two")
    assert not theirs.compare_and_set(first[0], b"late")
    second = theirs.read()
    assert second is not None and second[0] > first[0] and second[1] == b"two"


def test_of_racing_writers_exactly_one_wins_each_version(open_backend: Open) -> None:
    """Six threads, released together, try to succeed the same version, again and again."""
    backends = [open_backend() for _ in range(6)]
    rounds = times(backends[0], 30)
    barrier = threading.Barrier(len(backends))
    wins: list[tuple[int, bytes]] = []

    def race(me: int) -> None:
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


def test_the_newest_text_of_each_node_is_shown(open_backend: Open) -> None:
    """A node whose id looks like a path shows three."""
    ours, theirs = open_backend(), open_backend()
    assert not ours.shown()
    for text in ("1", "2 join 1 ::1/x, a", "3"):
        ours.show("../node a,b", text)
        assert theirs.shown() == {"../node a,b": text}


def test_texts_of_named_nodes_are_read_alone(open_backend: Open) -> None:
    """Forty nodes have sent a heartbeat; few or many are asked for, one of which does not exist."""
    ours, theirs = open_backend(), open_backend()
    nodes = [f"n{number}" for number in range(40)]
    for node in nodes:
        ours.show(node, "1")
    assert theirs.shown([*nodes[:30], "absent"]) == dict.fromkeys(nodes[:30], "1")
    assert theirs.shown([]) == {}
    ours.show("n7", "2")
    assert theirs.shown(["n7", "n8", "absent"]) == {"n7": "2", "n8": "1"}
