"""The contract of a rendezvous backend, kept by every implementation, and what the folder adds."""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_servers import free_port

from elastic.errors import UsageError
from elastic.rendezvous.backends import directory
from elastic.rendezvous.backends.backend import Backend, BackendFailed, PublishesGeneration
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.backends.etcd import EtcdBackend
from elastic.rendezvous.backends.etcd_http import Access
from elastic.rendezvous.backends.object_store import NO_DELAY, ObjectStoreBackend
from elastic.rendezvous.backends.tcp_store import TcpStoreBackend
from elastic.testing.fakes import MemoryBackend

Open = Callable[[], Backend]


@pytest.fixture(params=["memory", "directory", "etcd", "c10d", "objects"])
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Each call opens another node's view of the same state, if the backend has several."""
    shared = MemoryBackend()
    opened: list[TcpStoreBackend] = []

    def c10d() -> Backend:
        # The first one serves the store.
        opened.append(TcpStoreBackend(f"127.0.0.1:{port}", "a group/name"))
        opened[-1].beats()
        return opened[-1]

    match request.param:
        case "memory":
            yield lambda: shared
        case "directory":
            yield lambda: DirectoryBackend(tmp_path / "rendezvous")
        case "etcd":
            servers, group = request.getfixturevalue("etcd"), uuid.uuid4().hex
            yield lambda: EtcdBackend(servers.endpoints, f"a group/{group}", Access())
        case "objects":
            bucket = request.getfixturevalue("s3_bucket")
            yield lambda: ObjectStoreBackend(f"{bucket}/run/rendezvous", intervals=NO_DELAY)
        case "c10d":
            port = free_port()
            yield c10d
    for backend in opened:
        backend.close()


def times(backend: Backend, count: int) -> int:
    """How often to repeat a call: less often where each is several requests to a server of HTTP."""
    return count // 5 if isinstance(backend, ObjectStoreBackend) else count


def test_a_fresh_backend_is_empty(open_backend: Open) -> None:
    """A successor of a version that never existed is refused."""
    assert open_backend().read() is None
    assert not open_backend().compare_and_set(3, b"x")
    assert open_backend().read() is None


def test_only_a_writer_that_has_seen_the_newest_version_replaces_it(open_backend: Open) -> None:
    """A second writer still holds the older version, and a third believes that there is none."""
    ours, theirs = open_backend(), open_backend()
    assert ours.compare_and_set(None, b"one")
    first = theirs.read()
    assert first is not None and first[1] == b"one"
    assert ours.compare_and_set(first[0], b"two")
    assert not theirs.compare_and_set(first[0], b"late")
    assert not theirs.compare_and_set(None, b"later")
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

    threads = [threading.Thread(target=race, args=(me,)) for me in range(len(backends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [round_ for round_, _ in wins] == list(range(rounds))
    newest = backends[0].read()
    assert newest is not None and newest[1] == wins[-1][1]


def test_every_heartbeat_moves_the_counter(open_backend: Open) -> None:
    """A node whose id looks like a path sends three heartbeats, another node one."""
    ours, theirs = open_backend(), open_backend()
    seen = []
    for _ in range(3):
        ours.beat("../node a")
        seen.append(theirs.beats()["../node a"])
    theirs.beat("b")
    assert len(set(seen)) == 3 and min(seen) >= 0
    assert set(ours.beats()) == {"../node a", "b"}


def test_heartbeats_from_two_threads_of_a_node_all_count(open_backend: Open) -> None:
    """The thread of heartbeats and the thread that joins send one each at the same time."""
    backend = open_backend()
    count = times(backend, 50)
    threads = [threading.Thread(target=lambda: [backend.beat("a") for _ in range(count)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    before = backend.beats()["a"]
    backend.beat("a")
    assert before == 2 * count and backend.beats()["a"] == 2 * count + 1


def test_the_shown_generation_never_steps_back(open_backend: Open) -> None:
    """A node that slept in generation 3 shows its number after 5 was shown; a process outside the
    group reads it.
    """
    ours, theirs = open_backend(), open_backend()
    if not isinstance(ours, PublishesGeneration) or not isinstance(theirs, PublishesGeneration):
        # Of an object store the fence reads the group itself.
        assert isinstance(ours, MemoryBackend | ObjectStoreBackend)
        return
    stranger = open_backend()
    assert isinstance(stranger, PublishesGeneration)
    assert stranger.shown_generation() == 0
    ours.publish_generation(5)
    theirs.publish_generation(3)
    assert stranger.shown_generation() == 5


def test_versions_only_grow_from_generation_to_generation(open_backend: Open) -> None:
    """Writes and generations in turn, as a group makes them."""
    backend = open_backend()
    version, seen = None, []
    for generation in range(4):
        if isinstance(backend, PublishesGeneration):
            backend.publish_generation(generation)
        assert backend.compare_and_set(version, b"%d" % generation)
        found = backend.read()
        assert found is not None and found[1] == b"%d" % generation
        version = found[0]
        seen.append(version)
    assert seen == sorted(set(seen))


def test_a_writer_that_slept_cannot_create_a_deleted_version_again(tmp_path: Path) -> None:
    """It has read version 1 and sleeps until the successor of 1 is deleted as too old, so its name
    is free.
    """
    sleeper, busy = DirectoryBackend(tmp_path), DirectoryBackend(tmp_path)
    assert busy.compare_and_set(None, b"1")
    for version in range(1, 40):
        assert busy.compare_and_set(version, str(version + 1).encode())
    sleeper._versions = _blind_once(sleeper._versions)  # type: ignore[method-assign]
    assert not sleeper.compare_and_set(1, b"zombie")
    assert len(list(tmp_path.glob("state-*"))) == directory.KEPT_VERSIONS
    assert DirectoryBackend(tmp_path).read() == (40, b"40")


def _blind_once(list_versions: Callable[[], list[int]]) -> Callable[[], list[int]]:
    """The listing before the link is as old as the sleeper; the one after it is up to date."""
    old: list[list[int]] = [[1]]
    return lambda: old.pop() if old else list_versions()


def test_an_old_listing_hides_no_version_that_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system shows the folder as it was two versions ago."""
    backend = DirectoryBackend(tmp_path)
    for version in (None, 1, 2):
        assert backend.compare_and_set(version, b"v")
    assert backend.read() == (3, b"v")
    monkeypatch.setattr(backend, "_versions", lambda: [1])
    assert backend.read() == (3, b"v")


def test_files_of_dead_processes_are_removed_and_those_of_live_nodes_stay(tmp_path: Path) -> None:
    """A temporary file and a heartbeat are made two hours older; another heartbeat is fresh."""
    backend = DirectoryBackend(tmp_path)
    backend.beat("old")
    backend.beat("live")
    (tmp_path / ".tmp-dead").touch()
    for name in ("beat-old", ".tmp-dead"):
        before_s = (tmp_path / name).stat().st_mtime - 7200
        os.utime(tmp_path / name, (before_s, before_s))
    DirectoryBackend(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"beat-live"}


def test_a_path_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    """The folder's name, or its parent's, belongs to a file."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "rendezvous"):
        with pytest.raises(UsageError, match="should be a folder that this user may write"):
            DirectoryBackend(path)


def test_a_read_only_folder_is_a_usage_error() -> None:
    """A file system in which not even root can create files."""
    for path in (Path("/proc"), Path("/proc/rendezvous")):
        with pytest.raises(UsageError, match="may write"):
            DirectoryBackend(path)


def test_a_folder_that_vanishes_is_a_failure_of_the_backend(tmp_path: Path) -> None:
    """It is removed under a live node: no OSError escapes, and the message names what was tried."""
    backend = DirectoryBackend(tmp_path / "r")
    (tmp_path / "r").rmdir()
    for call in (
        backend.read,
        backend.beats,
        lambda: backend.beat("a"),
        lambda: backend.compare_and_set(None, b""),
    ):
        with pytest.raises(BackendFailed, match="could not"):
            call()
