"""The contract of a rendezvous backend, kept by every implementation, and what the folder adds."""

import errno
import os
import random
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_servers import free_port

from elastic.errors import UsageError
from elastic.rendezvous.backends import directory, host
from elastic.rendezvous.backends.backend import Backend, BackendFailed, CollectsRequests, NotesGeneration
from elastic.rendezvous.backends.directory import DirectoryBackend, read_generation
from elastic.rendezvous.backends.etcd import EtcdBackend
from elastic.rendezvous.backends.etcd_http import Access
from elastic.rendezvous.backends.host import HostBackend
from elastic.rendezvous.backends.object_store import NO_DELAY, ObjectStoreBackend
from elastic.testing.fakes import FakeClock, MemoryBackend

Open = Callable[[], Backend]


@pytest.fixture(params=["memory", "directory", "etcd", "c10d", "objects"])
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Each call opens another node's view of the same state, if the backend has several."""
    shared = MemoryBackend()
    opened: list[HostBackend] = []

    def c10d() -> Backend:
        # The first one serves the store.
        opened.append(HostBackend(f"127.0.0.1:{port}", "a group/name"))
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
            # A connection takes as long as the machine is busy.
            request.getfixturevalue("monkeypatch").setattr(host, "CONNECT_S", 100.0)
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
    assert before >= 2 * count and backend.beats()["a"] > before


def test_counters_of_named_nodes_are_read_without_those_of_others(open_backend: Open) -> None:
    """Forty nodes have sent a heartbeat; few or many are asked for, one of which does not exist."""
    ours, theirs = open_backend(), open_backend()
    nodes = [f"n{number}" for number in range(40)]
    for node in nodes:
        ours.beat(node)
    assert set(theirs.beats(["n7", "n8", "absent"])) == {"n7", "n8"}
    assert set(theirs.beats([*nodes[:30], "absent"])) == set(nodes[:30])
    assert theirs.beats([]) == {}
    before = theirs.beats(["n7"])["n7"]
    ours.beat("n7")
    assert theirs.beats(["n7", "n8"])["n7"] != before


def test_what_is_read_at_once_is_what_is_read_one_after_the_other(etcd) -> None:
    """A reader is asked for random nodes after random changes, by either way. Its twin keeps the
    counters that it was told, and knows which nodes have moved since.
    """
    group, draw = uuid.uuid4().hex, random.Random(7)
    ours, theirs = (EtcdBackend(etcd.endpoints, group, Access()) for _ in range(2))
    told: dict[str, int] = {}
    moved: set[str] = set()
    version, value = None, b""
    for turn in range(300):
        for node in draw.sample("abcde", draw.randrange(4)):
            ours.beat(node)
            moved.add(node)
        if draw.random() < 0.2:
            value = b"%d" % turn
            assert ours.compare_and_set(version, value)
            version, _ = ours.read()
        wanted = draw.sample("abcdef", draw.randrange(1, 4))
        if draw.random() < 0.6:
            found, beats = theirs.read_with_beats(wanted)
            assert found == (None if version is None else (version, value))
        else:
            beats = theirs.beats(wanted)
        for node, counter in beats.items():
            assert (told.get(node) != counter) == (node in moved), (turn, node)
            told[node] = counter
        assert set(beats) == (told.keys() | moved) & set(wanted)
        moved -= set(wanted)


def test_requests_are_read_all_at_once_until_they_are_replaced_or_taken_back(open_backend: Open) -> None:
    """Two nodes request something, one of them something else, and then nothing."""
    ours, theirs, reader = open_backend(), open_backend(), open_backend()
    assert isinstance(ours, CollectsRequests) and isinstance(theirs, CollectsRequests)
    assert isinstance(reader, CollectsRequests)
    assert reader.requests() == {}
    ours.request("../node a,b", "join 1 ::1/x")
    theirs.request("b", "leave")
    assert reader.requests() == {"../node a,b": "join 1 ::1/x", "b": "leave"}
    ours.request("../node a,b", "join 2")
    assert reader.requests() == {"../node a,b": "join 2", "b": "leave"}
    ours.request("../node a,b", "")
    theirs.request("b", "")
    assert reader.requests() == {}


def test_versions_only_grow_from_generation_to_generation(open_backend: Open) -> None:
    """Writes and generations in turn, as a group makes them."""
    backend = open_backend()
    version, seen = None, []
    for generation in range(4):
        if isinstance(backend, NotesGeneration):
            backend.note_generation(generation)
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


def test_files_of_dead_processes_are_removed_and_all_others_stay(tmp_path: Path) -> None:
    """A draft, a heartbeat and files of another program are two hours old; a heartbeat is fresh."""
    backend = DirectoryBackend(tmp_path)
    old, live = "host-1-0123abcd", "host-2-0123abcd"
    backend.beat(old)
    backend.beat(live)
    foreign = {".tmp-data", "beats/box.txt", "elastic-notes"}
    for name in (".elastic-dead", *foreign):
        (tmp_path / name).touch()
    for name in (f"beats/{old}", ".elastic-dead", *foreign):
        before_s = (tmp_path / name).stat().st_mtime - 7200
        os.utime(tmp_path / name, (before_s, before_s))
    DirectoryBackend(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {f"beats/{live}", *foreign}


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


def test_a_folder_that_a_person_removed_is_made_again(tmp_path: Path) -> None:
    """It is removed before each call of a live node; what this node knows is put back."""
    backend = DirectoryBackend(tmp_path / "r")
    shutil.rmtree(tmp_path / "r")
    assert backend.read() is None
    shutil.rmtree(tmp_path / "r")
    assert backend.compare_and_set(None, b"one")
    assert backend.read() == (1, b"one")
    shutil.rmtree(tmp_path / "r")
    backend.beat("a")
    shutil.rmtree(tmp_path / "r")
    assert backend.beats() == {}
    assert backend.read() == (1, b"one")
    assert DirectoryBackend(tmp_path / "r").read() == (1, b"one")


def test_a_folder_that_is_emptied_between_link_and_listing_fails_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person removes all files just after the link."""
    backend = DirectoryBackend(tmp_path)
    listings = iter([[], []])
    monkeypatch.setattr(backend, "_versions", lambda: next(listings))
    assert backend.compare_and_set(None, b"one")


def test_a_file_system_without_hard_links_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exFAT answers; no draft is left behind."""

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UsageError, match=r"hard links.*--rdzv-endpoint"):
        DirectoryBackend(tmp_path / "r")
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize("cut", [b"", b"{\n", b'{"generation": 3, "no', b"\0" * 20], ids=repr)
def test_a_torn_newest_version_gives_way_to_the_one_before(tmp_path: Path, cut: bytes) -> None:
    """Its number stays used up, so that no two values ever have the same one."""
    writer = DirectoryBackend(tmp_path)
    for version in (None, 1, 2):
        assert writer.compare_and_set(version, b'{"generation": %d}' % (version or 0))
    (tmp_path / "state-000000000003.json").write_bytes(cut)
    clock = FakeClock()
    late = DirectoryBackend(tmp_path, clock)
    with pytest.raises(BackendFailed, match="a torn file, as after a power cut"):
        late.read()
    clock.sleep(directory.TORN_PATIENCE_S)
    assert late.read() == (3, b'{"generation": 1}')
    assert late.read() == (3, b'{"generation": 1}')
    assert not late.compare_and_set(2, b"{}")
    assert late.compare_and_set(3, b"{}")
    assert writer.read() == late.read() == (4, b"{}")


def test_a_torn_version_that_a_live_node_knows_is_put_back(tmp_path: Path) -> None:
    """The newcomer waits for it; another one had given up on it a moment before."""
    live, clock = DirectoryBackend(tmp_path), FakeClock()
    assert live.compare_and_set(None, b'{"generation": 1}')
    assert live.compare_and_set(1, b'{"generation": 2}')
    assert live.read() == (2, b'{"generation": 2}')
    (tmp_path / "state-000000000002.json").write_bytes(b"")
    hasty, patient = DirectoryBackend(tmp_path, clock), DirectoryBackend(tmp_path, clock)
    with pytest.raises(BackendFailed):
        hasty.read()
    clock.sleep(directory.TORN_PATIENCE_S)
    assert hasty.read() == (2, b'{"generation": 1}')
    with pytest.raises(BackendFailed):
        patient.read()
    assert live.read() == (2, b'{"generation": 2}')
    assert patient.read() == hasty.read() == (2, b'{"generation": 2}')


def test_where_all_versions_are_torn_the_value_is_empty_and_the_number_goes_on(tmp_path: Path) -> None:
    """The caller begins a new group, whose generations count on from the run directory."""
    writer, clock = DirectoryBackend(tmp_path), FakeClock()
    for version in (None, 1, 2):
        assert writer.compare_and_set(version, b"{}")
    for path in tmp_path.glob("state-*"):
        path.write_bytes(b"")
    backend = DirectoryBackend(tmp_path, clock)
    with pytest.raises(BackendFailed):
        backend.read()
    clock.sleep(directory.TORN_PATIENCE_S)
    assert backend.read() == (3, b"")


def test_versions_and_heartbeats_are_written_on_a_full_disk(tmp_path: Path) -> None:
    """The disk has 70 bytes, and each new file takes more than what is left.

    A process that read before version 4 and comes late is still told so.
    """
    backend, late = DirectoryBackend(tmp_path), DirectoryBackend(tmp_path)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        is_new = not os.fstat(fd).st_size
        used_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        if is_new and used_bytes + len(data) > 70:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    value = b'{"members": "nodes"}'
    for version in (None, 1, 2):
        assert backend.compare_and_set(version, value)
    backend.beat("a")
    backend.note_generation(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        for version in (3, 4, 5):
            assert backend.compare_and_set(version, value)
            backend.beat("a")
            backend.note_generation(version)
        assert not late.compare_and_set(3, b"{}")
        with pytest.raises(BackendFailed, match="No space"):
            backend.compare_and_set(6, value * 4)
    assert DirectoryBackend(tmp_path).read() == (6, value)
    assert (backend.beats(), read_generation(tmp_path)) == ({"a": 4}, 5)
