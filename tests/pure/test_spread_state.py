"""Every rank gets the bytes of the rank that had them, whichever machines they are on."""

import os
from unittest.mock import Mock

import pytest
import torch
from steps import groups_of

from elastic.system.sealed_memory import SealedMemory, open_sealed
from elastic.train.groups import PIECE_BYTES, ProcessGroups
from elastic.train.state import spread as spread_state
from elastic.train.state.spread import Copy, spread

SIZE_BYTES = 2 * PIECE_BYTES + 3


def state():
    return torch.arange(SIZE_BYTES, dtype=torch.int64).to(torch.uint8)


def copy_of(data, *, is_sealed=True):
    if not is_sealed:
        return Copy(data=data)
    sealed = SealedMemory(len(data))
    sealed.write(0, data.numpy().data)
    sealed.seal()
    return Copy(data=torch.frombuffer(sealed.view(), dtype=torch.uint8), memory=sealed)


def spread_over(member, machines, holders, cannot_map, is_sealed):
    """What each rank got: whether it was the state, also after the others wrote to theirs, and in
    which chains it was.
    """
    groups, chains, pass_along = groups_of(member), [], ProcessGroups.pass_along

    def counted(self, chain, size_bytes, data):
        chains.append(list(chain))
        pass_along(self, chain, size_bytes, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroups, "pass_along", counted)
        patch.setattr(spread_state, "this_machine", lambda: machines[member.rank])
        if cannot_map:
            refuse = Mock(side_effect=PermissionError("not this one's"))
            patch.setattr(spread_state, "open_sealed", refuse)
        own = copy_of(state(), is_sealed=is_sealed) if member.rank in holders else Copy()
        found = spread(groups, own)
    is_state = torch.equal(found, state())
    groups.all_gather(0)
    found.fill_(member.rank)
    groups.all_gather(0)
    return [is_state and bool((found == member.rank).all()), chains]


@pytest.mark.parametrize(
    ("machines", "holders", "cannot_map", "is_sealed", "chains"),
    [
        ("aaa", [0], False, True, [[], [], []]),
        ("aabbc", [0], False, True, [[[0, 2, 4]], [], [[0, 2, 4]], [], [[0, 2, 4]]]),
        ("abbb", [1, 2, 3], False, False, [[[1, 0]], [[1, 0]], [], []]),
        ("aaa", [0], True, True, [[[0, 1], [0, 2]], [[0, 1]], [[0, 2]]]),
    ],
)
def test_every_rank_gets_the_state(ranks, machines, holders, cannot_map, is_sealed, chains):
    """One machine maps one memory, other machines receive it once, own snapshots are kept. What a
    rank writes afterwards, no other sees. Containers of one machine that hide each other's
    processes cannot map memory, and are sent the state.
    """
    found = ranks.run(len(machines), spread_over, machines, holders, cannot_map, is_sealed)
    assert found == [[True, of_rank] for of_rank in chains]


def problem_of(member):
    return spread(groups_of(member), Copy(problem="damaged") if member.rank else copy_of(state()))


def test_a_problem_of_one_rank_is_that_of_all(ranks):
    assert ranks.run(2, problem_of) == ["damaged"] * 2


def test_sealed_memory_cannot_be_changed_by_any_process():
    """Not through its descriptor, not through a new one, and not through a view."""
    memory = SealedMemory(10_000)
    memory.write(5000, bytes(range(250)) * 20)
    memory.write(0, bytes(range(250)) * 20)
    memory.seal()
    ours, theirs = memory.view(), open_sealed(memory.path)
    theirs[0] = ours[1] = 77
    fd = os.open(memory.path, os.O_RDWR)
    with pytest.raises(OSError, match="not permitted"):
        memory.write(0, b"x")
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 1)
    assert os.pread(fd, 3, 0) == bytes([0, 1, 2])
    os.close(fd)
    memory.close()
    assert (bytes(ours[:3]), bytes(theirs[:3])) == (bytes([0, 77, 2]), bytes([77, 1, 2]))


def test_memory_that_may_still_change_is_not_mapped():
    """A stranger's, or one that is still written."""
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100)
    with pytest.raises(ValueError, match="may still change"):
        open_sealed(f"/proc/self/fd/{fd}")
    os.close(fd)
