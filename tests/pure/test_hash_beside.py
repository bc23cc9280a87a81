"""The hashes of a save are those of its snapshot, with or without a thread; leaving ends them."""

import threading
from dataclasses import replace

import pytest
from payloads import hashes_of, payload_of

from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.snapshot import checksum
from elastic.snapshot.slots import SnapshotInfo
from elastic.uploader.hash_beside import HashBeside

IMAGE = memoryview(payload_of(bytes(range(250)) * 100))
INFO = SnapshotInfo(step=3, epoch=0, generation=1, world_size=1, torch="2", checksum=checksum.of_image(IMAGE))


@pytest.mark.parametrize("has_threads", [True, False])
def test_the_hashes_are_those_of_the_snapshot(monkeypatch, has_threads):
    """Where no thread can be started, the save hashes by itself once it has written."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    with HashBeside(IMAGE, INFO) as hashing:
        assert hashing.result() == hashes_of(IMAGE)


def test_a_snapshot_that_is_not_what_was_published_has_no_hashes():
    """Another checksum, or no image at all."""
    with (
        HashBeside(IMAGE, replace(INFO, checksum="0" * 64)) as hashing,
        pytest.raises(StoreFailed, match="changed"),
    ):
        hashing.result()
    with HashBeside(IMAGE[8:], INFO) as hashing, pytest.raises(CheckpointDamaged):
        hashing.result()


def test_a_save_that_ends_early_ends_its_hashing(monkeypatch):
    """The store refused the payload while a large snapshot was being hashed."""
    begun, may_go_on, pieces = threading.Event(), threading.Event(), []

    def source(image):
        def of(start, end):
            for at in range(start, end):
                pieces.append(at)
                if len(pieces) == 500:
                    begun.set()
                    assert may_go_on.wait(60)
                yield image[at : at + 1]

        return of

    monkeypatch.setattr("elastic.uploader.hash_beside.in_memory", source)
    hashing = HashBeside(IMAGE, INFO)
    hashing.__enter__()
    assert begun.wait(60)
    leaving = threading.Thread(target=hashing.__exit__, args=(None, None, None))
    leaving.start()
    while not hashing._is_over:
        leaving.join(0.001)
    may_go_on.set()
    leaving.join(60)
    assert not leaving.is_alive()
    assert len(pieces) < len(IMAGE)
    with pytest.raises(StoreFailed, match="ended before"):
        hashing.result()
