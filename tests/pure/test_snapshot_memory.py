"""Where there is little memory, one copy of the state is better than none."""

import pytest

from elastic.agent.snapshot_memory import SLOTS, SnapshotMemory
from elastic.divergence import vote_of
from elastic.snapshot import slots
from elastic.snapshot.slots import SnapshotInfo
from elastic.system.control_page import ControlPage

STATE_BYTES = 1 << 20
HEADERS_BYTES = 1 << 16  # more than a page for the memory and one for each slot


class Node:
    """An agent's memory on a machine with so much left."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes
        self.said: list[str] = []
        self.page = ControlPage.create()
        self.memory = SnapshotMemory(self.page, SLOTS, self.said.append)

    def asks(self) -> None:
        """The workers ask for memory, and the agent has decided once this returns."""
        self.page.wanted_bytes = STATE_BYTES
        self.memory.poll()
        if self.memory._thread is not None:
            self.memory._thread.join()
            self.memory.poll()


@pytest.fixture
def node(monkeypatch):
    node = Node(0)
    monkeypatch.setattr(slots, "available_bytes", lambda: node.left_bytes)
    return node


def test_with_memory_for_all_there_are_all_slots(node):
    node.left_bytes = SLOTS * STATE_BYTES + HEADERS_BYTES
    node.asks()

    assert node.memory.slots.num_slots == SLOTS
    assert not node.said


def test_with_memory_for_one_copy_of_the_state_checkpoints_can_be_made(node):
    """One that does not exist can hold no state to save: a run would lose every step at its end."""
    node.left_bytes = STATE_BYTES + HEADERS_BYTES
    node.asks()

    assert node.memory.slots.num_slots == 1
    assert node.page.slots_fd == node.memory.slots.fd
    (said,) = node.said
    assert said.startswith("no memory for 3 snapshots of 1 MB; there is one")


def test_without_memory_for_one_copy_the_agent_says_what_to_do_once_in_a_generation(node):
    """The next generation asks again, and by then there is memory."""
    node.left_bytes = STATE_BYTES // 2
    node.asks()
    node.asks()

    assert node.memory.slots is None
    (said,) = node.said
    assert said.startswith("no memory for one copy of the state, 1 MB")
    assert "fewer workers on this node or on a machine with more memory" in said
    node.left_bytes = SLOTS * STATE_BYTES + HEADERS_BYTES
    node.page.clear()
    node.memory.publish()
    node.asks()
    assert node.memory.slots.num_slots == SLOTS


def publish(node, step, *, is_agreed=False):
    """A snapshot whose checksum is full of its step's digit."""
    memory = node.memory.slots
    info = SnapshotInfo(step=step, epoch=0, generation=1, world_size=2, torch="2", checksum=64 * str(step))
    snapshot = memory.publish(memory.begin(), size_bytes=1, info=info)
    if is_agreed:
        memory.agree(snapshot.slot, snapshot.seq)


def votes_of(*steps):
    return {step: vote_of(64 * str(step)) for step in steps}


@pytest.mark.parametrize(
    ("votes", "kept"),
    [
        ([votes_of(1, 2), votes_of(1, 2)], [2, 1]),
        ([votes_of(1, 2), votes_of(1)], [1]),  # a worker died before it had voted
        ([votes_of(1, 2), {2: vote_of(64 * "7")}], [1]),  # one had another state
        ([votes_of(1), votes_of(1)], [1]),
        ([], [1]),  # ranks were found to differ: what the sums did not agree on is void
    ],
)
def test_a_snapshot_without_the_ranks_agreement_is_kept_if_all_workers_of_the_node_had_it(node, votes, kept):
    """All workers died in the step after. Step 1 was agreed on by all ranks, step 2 was not yet."""
    node.left_bytes = SLOTS * STATE_BYTES + HEADERS_BYTES
    node.asks()
    publish(node, 1, is_agreed=True)
    publish(node, 2)
    assert node.memory.newest.info.step == 1

    node.memory.keep_agreed(votes)

    assert [each.info.step for each in node.memory.slots.whole()] == kept
    assert node.memory.newest.info.step == kept[0]


def test_what_is_written_over_an_agreed_snapshot_is_not_agreed_on(node):
    """The mark belongs to one snapshot and not to its slot."""
    node.left_bytes = STATE_BYTES + HEADERS_BYTES  # for one slot
    node.asks()
    publish(node, 1, is_agreed=True)
    publish(node, 2)
    assert node.memory.newest is None
