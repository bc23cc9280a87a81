"""A group in an object store that is out of date or careless."""

import uuid

import pytest

from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.rendezvous.backends.object_store import ObjectStoreBackend
from elastic.storage.remote import Objects


def opened(bucket):
    backend = ObjectStoreBackend(f"{bucket}/r", state_s=0.0, beats_s=0.0)
    backend.read()
    return backend


def test_an_existing_version_that_cannot_be_read_is_no_step_back(s3_bucket):
    """The store refuses to create the version because it exists, but reads answer as if it did not:
    a failure.
    """
    ours, theirs = opened(s3_bucket), opened(s3_bucket)
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


def test_an_old_listing_hides_no_version_and_no_node(s3_bucket):
    """Listings stay as they were after one node's first heartbeat. It sends more, and another node
    comes, which is alive for those who ask for it by its name.
    """
    listed, kept = Objects.listed, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Objects, "listed", lambda self, folder: kept.setdefault(folder, listed(self, folder)).copy()
        )
        backend, other = opened(s3_bucket), opened(s3_bucket)
        backend.show("a", "0")
        for text in "0123":
            backend.show("a", text)
            assert other.shown() == {"a": text}
        assert backend.compare_and_set(None, b"one")
        assert other.read() == (1, b"one")
        backend.show("b", "1")
        assert set(opened(s3_bucket).shown()) == {"a"}
        assert other.shown({"b", "c"}) == {"b": "1"}
    assert len(kept) == 2
    assert set(opened(s3_bucket).shown()) == {"a", "b"}


def test_a_node_that_asks_rarely_restores_no_old_version(s3_bucket):
    """It polls once an hour. It knows its own writes at once, and a refused write makes it read."""
    sleeper = ObjectStoreBackend(f"{s3_bucket}/r", state_s=3600.0)
    busy = opened(s3_bucket)
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
