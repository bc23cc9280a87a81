"""The point `snapshot` is in the middle of the copy: half of a state lies in a slot that nobody finds."""

import pytest
import torch

from elastic.snapshot.copy_to_slot import HostCopy
from elastic.snapshot.slots import SnapshotSlots
from elastic.testing.fakes import FakeClock
from elastic.train.snapshotting import Snapshotting, StepRecord
from elastic.train.state import FlatState


class Died(Exception):  # noqa: N818 - nothing is wrong
    pass


@pytest.fixture
def area():
    area = SnapshotSlots.create(1 << 16, 3)
    yield area
    area.close()


def begin(snapshots, step, halfway=None):
    """A state of four tensors full of its step's number."""
    tensors = {name: torch.full([16], float(step)) for name in "abcd"}
    point = StepRecord(step=step, epoch=0, chain="", line={})
    snapshots.start(FlatState(tensors=tensors, document={}), point, late=(), halfway=halfway)


def bytes_of(step):
    return torch.full([32], float(step)).numpy().tobytes()


def test_a_process_that_dies_halfway_leaves_half_a_state_that_nobody_finds(area):
    """Step 1 is kept whole; the copy of step 2 is left in its middle: half of its tensors are there, the other half is not, and the newest snapshot is step 1's."""
    snapshots = Snapshotting(lambda _size: area, HostCopy(), FakeClock(), {})
    begin(snapshots, 1)
    snapshots.finish()

    def die():
        raise Died

    with pytest.raises(Died):
        begin(snapshots, 2, halfway=die)
    assert [snapshot.about["step"] for snapshot in area.whole()] == [1]
    (torn,) = (slot for slot in range(area.slots) if bytes_of(2) in bytes(area.body(slot)))
    assert bytes_of(2) * 2 not in bytes(area.body(torn))
    assert area.newest().slot != torn


def test_a_process_that_lives_on_halfway_keeps_the_whole_state(area):
    """A pause in the middle of the copy: afterwards the snapshot is what it would have been."""
    snapshots = Snapshotting(lambda _size: area, HostCopy(), FakeClock(), {})
    reached = []
    begin(snapshots, 2, halfway=lambda: reached.append(area.newest()))
    taken = snapshots.finish()
    assert reached == [None]
    assert bytes_of(2) * 2 in bytes(area.body(taken.snapshot.slot))
