"""The hashes of a save are those of its snapshot; leaving ends them."""

import threading
from dataclasses import replace

import pytest
from payloads import hashes_of, payload_of

from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.snapshot import checksum
from elastic.snapshot.slots import SnapshotInfo
from elastic.uploader.save import hash_beside

IMAGE = memoryview(payload_of(bytes(range(250)) * 100))
INFO = SnapshotInfo(step=3, epoch=0, generation=1, world_size=1, torch="2", checksum=checksum.of_image(IMAGE))


def test_the_hashes_are_those_of_the_snapshot():
    with hash_beside(IMAGE, INFO) as hashed:
        assert hashed() == hashes_of(IMAGE)


def test_a_snapshot_that_is_not_what_was_published_has_no_hashes():
    """Another checksum, or no image at all."""
    with (
        hash_beside(IMAGE, replace(INFO, checksum="0" * 64)) as hashed,
        pytest.raises(StoreFailed, match="changed"),
    ):
        hashed()
    with hash_beside(IMAGE[8:], INFO) as hashed, pytest.raises(CheckpointDamaged):
        hashed()


def test_a_save_that_ends_early_ends_its_hashing(monkeypatch):
    """The store refused the payload while a large snapshot was being hashed."""
    begun = threading.Event()

    def endless(image):
        def of(start, end):
            yield image[start:end]
            begun.set()
            while True:
                yield image[end:end]

        return of

    monkeypatch.setattr("elastic.uploader.save.in_memory", endless)
    with hash_beside(IMAGE, INFO) as hashed:
        assert begun.wait(60)
    with pytest.raises(StoreFailed, match="ended before"):
        hashed()
