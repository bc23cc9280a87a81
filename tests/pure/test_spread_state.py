"""Every rank gets the bytes of the rank that had them, whichever machines they are on."""

import os
from typing import ClassVar

import pytest
import torch

from elastic.system.sealed_memory import SealedMemory, open_sealed
from elastic.train.groups import PIECE_BYTES, ProcessGroups
from elastic.train.state import spread as spread_state
from elastic.train.state.spread import Copy, spread

SIZE_BYTES = 2 * PIECE_BYTES + 3


def state():
    return torch.arange(SIZE_BYTES, dtype=torch.int64).to(torch.uint8)


class Counted(ProcessGroups):
    """Counts the chains that a rank takes part in."""

    chains: ClassVar[list[list[int]]] = []

    def pass_along(self, chain, size_bytes, data):
        self.chains.append(list(chain))
        super().pass_along(chain, size_bytes, data)


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
    groups = Counted(
        rank=member.rank,
        world_size=member.world_size,
        local_rank=member.rank,
        device=torch.device("cpu"),
        control=member.group,
    )
    Counted.chains = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread_state, "this_machine", lambda: machines[member.rank])
        if cannot_map:
            patch.setattr(spread_state, "open_sealed", refuse)
        own = copy_of(state(), is_sealed=is_sealed) if member.rank in holders else Copy()
        found = spread(groups, own)
    is_state = torch.equal(found, state())
    groups.all_gather(0)
    found.fill_(member.rank)
    groups.all_gather(0)
    return [is_state and bool((found == member.rank).all()), Counted.chains]


def refuse(_path):
    raise PermissionError("not this one's")


def test_ranks_of_one_machine_map_one_memory_and_send_nothing(ranks):
    """What one of them writes afterwards, no other sees."""
    assert ranks.run(3, spread_over, ["a", "a", "a"], [0], False, True) == [[True, []]] * 3


def test_another_machine_receives_a_state_once(ranks):
    """Of two others with two ranks and one: a chain of one rank each."""
    found = ranks.run(5, spread_over, ["a", "a", "b", "b", "c"], [0], False, True)
    assert [is_state for is_state, _ in found] == [True] * 5
    assert [chains for _, chains in found] == [[[0, 2, 4]], [], [[0, 2, 4]], [], [[0, 2, 4]]]


def test_ranks_that_have_a_snapshot_of_their_own_keep_it(ranks):
    """Those of the machine that lost its memory get the state from one of the others."""
    found = ranks.run(4, spread_over, ["a", "b", "b", "b"], [1, 2, 3], False, False)
    assert found == [[True, [[1, 0]]], [True, [[1, 0]]], [True, []], [True, []]]


def test_ranks_that_cannot_map_memory_are_sent_the_state(ranks):
    """Containers of one machine that hide each other's processes: nobody waits for ever."""
    found = ranks.run(3, spread_over, ["a", "a", "a"], [0], True, True)
    assert [is_state for is_state, _ in found] == [True] * 3
    assert found[0][1] == [[0, 1], [0, 2]]


def problem_of(member):
    groups = ProcessGroups(
        rank=member.rank,
        world_size=member.world_size,
        local_rank=member.rank,
        device=torch.device("cpu"),
        control=member.group,
    )
    return spread(groups, Copy(problem="damaged") if member.rank else copy_of(state()))


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
