"""One contract for every store: a local folder, fsspec's memory, and S3 as a real server on the
loopback speaks it.
"""

import errno
import os
import shutil
import uuid
from unittest.mock import Mock

import pytest
from payloads import commit_payload, in_memory_file, payload_of

from elastic.checkpoint.catalog import list_commits
from elastic.errors import StoreFailed
from elastic.storage import local
from elastic.storage import store as module
from elastic.storage.remote import open_store
from elastic.storage.store import CHUNK_BYTES, StoredObject, StoreUnavailable, create_or_read, read_small
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock, FakeStore


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}/run/checkpoints"
    return f"{tmp_path if request.param == 'local' else f'memory://{uuid.uuid4().hex}'}/run/checkpoints"


def whole(store, name):
    return b"".join(store.read(name))


def written(store, name, data, midway=lambda: None):
    with in_memory_file(data) as payload:
        return store.write(name, payload, midway)


def test_a_written_payload_is_listed_and_read_back(url):
    """A payload of three chunks and an odd byte through a fresh instance, as another process would
    see it. Midway it is not complete.
    """
    data, seen = os.urandom(1000) * (3 * CHUNK_BYTES // 1000) + b"x", []

    def midway():
        seen.append(sum(each.size_bytes for each in open_store(url).list()))

    assert written(open_store(url), "a/b/payload", data, midway) == len(data)
    assert len(seen) == 1 and seen[0] < len(data)
    store = open_store(url)
    assert store.list() == [StoredObject(name="a/b/payload", size_bytes=len(data))]
    assert whole(store, "a/b/payload") == data


def test_an_object_is_created_once(url):
    """Two instances create the same name: the first one's bytes stay, and the second gets False. A
    name that does not exist is an answer, in a folder that does and in one that does not.
    """
    assert open_store(url).create("s/COMMIT.json", b"first")
    assert not open_store(url).create("s/COMMIT.json", b"second")
    assert whole(open_store(url), "s/COMMIT.json") == b"first"
    assert [entry.name for entry in open_store(url).list()] == ["s/COMMIT.json"]
    with pytest.raises(module.ObjectNotFound):
        whole(open_store(url), "s/absent")
    assert read_small(open_store(url), "t/absent", SystemClock()) is None


def test_a_deleted_object_is_gone_for_who_listed_it_before(url):
    """A listing that was kept from before would still show it; deleting twice is fine. At first not
    even the folder is there.
    """
    reader, writer = open_store(url), open_store(url)
    assert reader.list() == []
    for name in ("s/one", "s/two"):
        writer.create(name, b"1")
    for gone in ("s/one", "s/one", "s/two"):
        assert "s/two" in [entry.name for entry in reader.list()]
        writer.delete(gone)
        assert gone not in [entry.name for entry in reader.list()]
    assert reader.list() == []


def test_a_folder_removed_during_a_listing_hides_no_newer_one(tmp_path, monkeypatch):
    """Retention deletes the only checkpoint that the listing has seen, for a newer one. An empty
    answer would start the run over.
    """
    store, scandir = open_store(str(tmp_path)), os.scandir
    store.create("1/COMMIT.json", b"1")

    def scanned(folder):
        found = list(scandir(folder))
        if folder == tmp_path and (tmp_path / "1").exists():
            store.create("2/COMMIT.json", b"2")
            store.delete("1/COMMIT.json")
        return found

    monkeypatch.setattr(os, "scandir", scanned)
    assert [entry.name for entry in store.list()] == ["2/COMMIT.json"]


def test_a_store_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch):
    """Taking an error for nothing would start the training over silently; fsspec's own `find`
    leaves out folders that cannot be listed.
    """
    refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    remote = open_store(f"memory://{uuid.uuid4().hex}/c")
    remote.create("s/one", b"1")
    remote._objects.fs.ls = refuse
    monkeypatch.setattr(local.os, "scandir", refuse)
    for store in (remote, open_store(str(tmp_path))):
        with pytest.raises(StoreFailed, match="permissions"):
            list_commits(store, FakeClock())


def test_another_writers_name_is_durable_once_it_is_found(tmp_path, monkeypatch):
    """That one stands still before it syncs the folder. Who relies on its record must do so."""
    store, synced = open_store(str(tmp_path)), []
    assert store.create("1/COMMIT.json", b"{}")
    monkeypatch.setattr(local.files, "sync_folder", synced.append)
    assert not store.create("1/COMMIT.json", b"{}")
    assert synced == [tmp_path / "1", tmp_path]


def test_the_size_of_a_payload_is_that_of_its_file(tmp_path):
    """A person moves the run away during the upload, and puts a copy of it back."""
    store, data = open_store(str(tmp_path / "run")), bytes(3 * CHUNK_BYTES)

    def move_and_copy():
        (tmp_path / "run").rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", tmp_path / "run")

    stored = written(store, "10/a-1-f/state.safetensors", data, move_and_copy)
    assert 0 < stored < len(data)
    assert stored == len(whole(store, "10/a-1-f/state.safetensors"))


def test_an_identity_that_is_there_needs_no_room_on_the_disk(tmp_path, monkeypatch):
    """A generation begins, or a node joins, while the disk is full."""
    store = open_store(str(tmp_path))
    assert create_or_read(store, "run.json", b"first", SystemClock()) == b"first"

    monkeypatch.setattr(store, "create", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert create_or_read(store, "run.json", b"second", SystemClock()) == b"first"


def test_an_interrupted_local_write_can_be_tried_again(tmp_path):
    """The first write breaks half-way with an I/O error; its torn file must not stand in the way of
    the second.
    """
    store = open_store(str(tmp_path / "c"))

    with pytest.raises(StoreUnavailable, match="Input/output"):
        written(store, "a/p", b"0123456789", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert store.list() == []
    assert written(store, "a/p", b"0123456789") == 10


@pytest.mark.parametrize(
    ("error", "is_worth_another_try"),
    [
        (TimeoutError("read timed out"), True),
        (OSError(errno.EIO, "409 ConditionalRequestConflict"), True),
        (ConnectionResetError("reset"), True),
        (RuntimeError("a library's own class"), True),
        (PermissionError("AccessDenied"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), False),
    ],
)
def test_only_errors_that_may_pass_are_tried_again(error, is_worth_another_try):
    """Exceptions of storage libraries, by class and errno: the save pauses until its deadline, or
    fails at once.
    """
    store, clock = FakeStore(), FakeClock()
    store.before = Mock(side_effect=module.as_store_failure("writing x", error))
    with pytest.raises(StoreFailed):
        commit_payload(store, payload_of(b"state"), 1, clock=clock)
    assert (1000.0 < clock.now <= 1100.0) if is_worth_another_try else clock.now == 1000.0


def test_a_library_error_of_its_own_class_becomes_a_sentence():
    """botocore's exceptions share no base with OSError; one that got through would end the
    uploader's thread.
    """
    store = open_store(f"memory://{uuid.uuid4().hex}/c")
    error = type("EndpointConnectionError", (Exception,), {})("Could not connect")
    store._objects.fs.pipe_file = Mock(side_effect=error)
    with pytest.raises(StoreUnavailable, match="Could not connect"):
        store.create("s/one", b"1")
