"""A group in an object store that is out of date or careless."""

import uuid

import pytest
from faulty_storage import Deed, FaultyStorage

from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.rendezvous.backends.object_store import ObjectStoreBackend


@pytest.fixture
def storage(s3, s3_bucket, monkeypatch):
    """Storage that fails as the test wants; `storage.url` is a folder of its own in it."""
    proxy = FaultyStorage(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    proxy.url = f"{s3_bucket}/run/rendezvous"
    yield proxy
    proxy.close()


def opened(storage, **options):
    backend = ObjectStoreBackend(storage.url, state_s=0.0, beats_s=0.0, **options)
    backend.read()
    return backend


def test_an_existing_version_that_cannot_be_read_is_no_step_back(storage):
    """The store refuses to create the version because it exists, but reads answer as if it did not:
    a failure.
    """
    ours, theirs = opened(storage), opened(storage)
    theirs._refresh = lambda: None  # it slept through
    assert ours.compare_and_set(None, b"one")
    assert not theirs.compare_and_set(None, b"two")
    del theirs._refresh
    read = theirs._objects.read
    theirs._objects.read = lambda name: None
    with pytest.raises(BackendFailed, match="cannot be found"):
        theirs.read()
    theirs._objects.read = read
    assert theirs.read() == (1, b"one")


def test_an_old_listing_hides_no_version_and_no_node(storage):
    """Listings stay as they were after one node's first heartbeat. It sends more, and another node
    comes, which is alive for those who ask for it by its name.
    """
    backend, other = opened(storage), opened(storage)
    backend.show("a", "0")
    assert other.shown() == {"a": "0"}
    stale = storage.fail(Deed.STALE, lambda method, path: "list-type" in path)
    for text in "123":
        backend.show("a", text)
        assert other.shown() == {"a": text}
    assert backend.compare_and_set(None, b"one")
    assert other.read() == (1, b"one")
    backend.show("b", "1")
    assert set(opened(storage).shown()) == {"a"}
    assert other.shown({"b", "c"}) == {"b": "1"}
    assert stale.struck
    storage.heal()
    assert set(opened(storage).shown()) == {"a", "b"}


def test_a_node_that_asks_rarely_restores_no_old_version(s3_bucket):
    """It polls once an hour. It knows its own writes at once, and a refused write makes it read."""
    sleeper = ObjectStoreBackend(f"{s3_bucket}/r", state_s=3600.0)
    busy = ObjectStoreBackend(f"{s3_bucket}/r", state_s=0.0, beats_s=0.0)
    assert sleeper.compare_and_set(None, b"1")
    assert sleeper.read() == (1, b"1") == busy.read()
    for version in range(1, 13):
        assert busy.compare_and_set(version, b"%d" % (version + 1))
    assert sleeper.read() == (1, b"1")
    assert not sleeper.compare_and_set(1, b"zombie")
    assert sleeper.read() == (13, b"13")


def test_storage_that_creates_an_object_twice_is_refused(s3_bucket):
    """A service ignores the condition of a creation: of several nodes that form a generation, each
    would believe that it did.
    """
    backend = ObjectStoreBackend(f"{s3_bucket}/r", state_s=0.0, beats_s=0.0)

    def create(name, data):
        backend._objects.write(name, data)
        return True

    backend._objects.create = create
    with pytest.raises(BackendRefused, match="created twice"):
        backend.read()


def test_a_missing_bucket_is_refused_at_once(s3_bucket):
    """A misspelled name."""
    with pytest.raises(BackendRefused, match="bucket"):
        ObjectStoreBackend(f"s3://never-made-{uuid.uuid4().hex}/r", state_s=0.0, beats_s=0.0).read()
