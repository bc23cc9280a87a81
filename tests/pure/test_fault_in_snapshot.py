"""The point `snapshot` is in the middle of the copy: half of a state is in a slot that no reader
finds.
"""

import pytest
import torch

from elastic.snapshot.copy_to_slot import HostCopy
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.testing.fakes import FakeClock
from elastic.train.state.flat import FlatState
from elastic.train.state.snapshotting import Snapshotting


class Died(Exception):  # noqa: N818 - nothing is wrong
    pass


@pytest.fixture
def slots():
    slots = SnapshotSlots.create(1 << 16, 3)
    yield slots
    slots.close()


def take(snapshots, step, halfway=None):
    """A state of four tensors full of its step's number."""
    tensors = {name: torch.full([16], float(step)) for name in "abcd"}
    info = SnapshotInfo(step=step, epoch=0, generation=1, world_size=1, torch="2")
    return snapshots.take(FlatState(tensors=tensors, document={}), info, halfway=halfway)


def bytes_of(step):
    return torch.full([32], float(step)).numpy().tobytes()


def test_a_process_that_dies_in_a_copy_leaves_a_slot_that_is_not_found(slots):
    """Step 1 is whole. The copy of step 2 ends after half of its tensors: the newest is step 1."""
    snapshots = Snapshotting(lambda _size: slots, HostCopy(), FakeClock())
    take(snapshots, 1)

    def die():
        raise Died

    with pytest.raises(Died):
        take(snapshots, 2, halfway=die)
    assert [snapshot.info.step for snapshot in slots.whole()] == [1]
    (torn,) = (slot for slot in range(slots.num_slots) if bytes_of(2) in bytes(slots.body(slot)))
    assert bytes_of(2) * 2 not in bytes(slots.body(torn))
    assert slots.newest().slot != torn


def test_a_process_that_continues_a_copy_publishes_the_whole_state(slots):
    """A pause in the middle of the copy: afterwards the snapshot is what it would have been."""
    snapshots = Snapshotting(lambda _size: slots, HostCopy(), FakeClock())
    reached = []
    published = take(snapshots, 2, halfway=lambda: reached.append(slots.newest()))
    assert reached == [None]
    assert bytes_of(2) * 2 in bytes(slots.body(published.snapshot.slot))
