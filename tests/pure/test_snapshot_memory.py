"""Where there is little memory, one copy of the state is better than none."""

import os
from pathlib import Path

import pytest
import torch

from elastic.agent.snapshot_memory import SLOTS, SnapshotMemory
from elastic.divergence import vote_of
from elastic.snapshot import slots
from elastic.snapshot.copy_to_slot import HostCopy
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.system.control_page import ControlPage
from elastic.testing.fakes import FakeClock
from elastic.train.state.flat import FlatState
from elastic.train.state.snapshotting import AgentSlots, Snapshotting

STATE_BYTES = 1 << 20
HEADERS_BYTES = 1 << 17  # more than those of the memory and of one slot


class Node:
    """An agent's memory on a machine with so much left."""

    def __init__(self, left_bytes):
        self.left_bytes = left_bytes
        self.said = []
        self.page = ControlPage.create()
        self.memory = SnapshotMemory(self.page, SLOTS, self.said.append)

    def asks(self, size_bytes=STATE_BYTES):
        """The workers ask for memory, and the agent has decided once this returns."""
        self.page.wanted_bytes = size_bytes
        self.memory.poll()
        if (created := self.memory._created) is not None:
            created.exception()
            self.memory.poll()


def state_of(size):
    return FlatState(tensors={"m.w": torch.zeros(size)}, document={"m": {}})


STATE = state_of(8)


def info_of(step, checksum=""):
    return SnapshotInfo(step=step, generation=1, checksum=checksum)


def snapshotting_of(node, clock=None):
    """Of a worker of the node."""
    return Snapshotting(AgentSlots(node.page, os.getpid()).of_size, HostCopy(), clock or FakeClock())


@pytest.fixture
def node(monkeypatch):
    node = Node(0)
    monkeypatch.setattr(slots, "available_bytes", lambda: node.left_bytes)
    return node


def test_the_first_snapshot_waits_for_memory_that_is_made(node):
    """Seconds for gigabytes, which the agent makes beside training; a later one does not wait."""
    node.left_bytes, clock = 10 * STATE_BYTES, FakeClock()
    taking, until_s = snapshotting_of(node, clock), clock.now + 20

    def sleep(seconds):
        clock.now += seconds
        if clock.now > until_s:
            node.asks(node.page.wanted_bytes)

    clock.sleep = sleep
    assert taking.take(STATE, info_of(1)).snapshot.slot == 0 and clock.now > until_s
    late = snapshotting_of(Node(0), clock)
    for waits in (True, False):
        began_s = clock.now
        assert late.take(STATE, info_of(1)) is None and (clock.now > began_s) == waits


def test_less_memory_is_said_once_in_a_generation(node):
    """Without room for three copies there is one: a run that could save none would lose every step
    at its end. Without room for one, the next generation asks again.
    """
    node.left_bytes = STATE_BYTES // 2
    node.asks()
    node.asks()
    assert node.memory.slots is None
    node.left_bytes = STATE_BYTES + HEADERS_BYTES
    node.page.clear()
    node.memory.publish()
    node.asks()
    assert node.memory.slots.num_slots == 1
    assert node.page.slots_fd == node.memory.slots.fd
    publish(node, 1, is_agreed=True)
    publish(node, 2)
    assert node.memory.newest is None  # the mark belonged to the snapshot, and not to its slot
    none, one = node.said
    assert none.startswith("no memory for one copy of the state, 1 MB")
    assert one.startswith("no memory for 3 snapshots of 1 MB; there is one")


def test_a_last_state_does_not_wait_for_refused_memory(node):
    """It waits half a minute for a free slot, which is all the time that a node has to leave."""
    clock, began_s = FakeClock(), FakeClock().now
    snapshotting = snapshotting_of(node, clock)
    assert snapshotting.take(STATE, info_of(1), patient=True) is None
    assert clock.now > began_s

    node.asks(node.page.wanted_bytes)
    refused_s = clock.now
    assert snapshotting.take(STATE, info_of(1), patient=True) is None
    assert clock.now == refused_s


def test_a_last_state_waits_for_the_save_that_has_the_only_slot():
    """Its offer has a limit of minutes, and one per gigabyte."""
    clock, slots = FakeClock(), SnapshotSlots.create(STATE_BYTES, 1)
    taking = Snapshotting(lambda _size: slots, HostCopy(), clock)
    saved, until_s = taking.take(STATE, info_of(1)).snapshot, clock.now + 300

    def sleep(seconds):
        clock.now += seconds
        if clock.now > until_s:
            slots.release(saved.slot)

    slots.lease(saved.slot, saved.seq)
    clock.sleep = sleep
    assert taking.take(STATE, info_of(2)) is None
    assert taking.take(STATE, info_of(2), patient=True).snapshot.info.step == 2 and clock.now > until_s


def test_a_worker_keeps_no_slots_that_its_state_has_outgrown(node):
    """The state grows three times, and is snapshotted after each. Slots stay for as long as one
    process has them open, and they hold three copies of the state.
    """
    node.left_bytes = 1 << 40
    snapshotting = snapshotting_of(node)
    for step in range(1, 5):
        state = state_of(step * STATE_BYTES)
        assert snapshotting.take(state, info_of(step), patient=True) is None  # asks
        node.asks(node.page.wanted_bytes)
        taken = snapshotting.take(state, info_of(step), patient=True)
        snapshotting.agree(step, vote_of(taken.snapshot.info.checksum))
        node.memory.poll()
        open_fds = [fd for fd in Path("/proc/self/fd").iterdir() if is_slots_of_state(fd)]
        assert len(open_fds) == 4  # the agent's and the worker's, each with the one of its mapping


def test_what_ended_workers_asked_for_replaces_no_slots(node):
    """The next workers are about to open these, and to restore from them."""
    node.left_bytes = 1 << 40
    node.asks()
    there, node.page.wanted_bytes = node.memory.slots, 2 * STATE_BYTES
    node.memory.poll()
    node.memory._created.exception()
    node.page.clear()
    node.memory.publish()
    node.memory.poll()
    assert node.memory.slots is there


def is_slots_of_state(fd):
    """Whether it is the memory of a state of this test's sizes."""
    try:
        return "elastic-snapshots" in str(fd.readlink()) and fd.stat().st_size > 3 * 4 * STATE_BYTES
    except FileNotFoundError:
        return False  # the descriptor of the listing itself


def publish(node, step, *, is_agreed=False):
    """A snapshot whose checksum is full of its step's digit, where workers write it."""
    memory = SnapshotSlots.open(f"/proc/self/fd/{node.page.slots_fd}")
    snapshot = memory.publish(memory.begin(), size_bytes=1, info=info_of(step, 64 * str(step)))
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
        ([], [1]),  # ranks were found to differ: what the sums did not agree on is void
    ],
)
def test_a_snapshot_not_agreed_on_is_kept_if_its_node_had_it(node, votes, kept):
    """All workers died in the step after. Step 1 was agreed on by all ranks, step 2 was not yet.

    Later the state outgrows the memory, and the second snapshot in the next one has that number.
    """
    node.left_bytes = 1 << 40
    node.asks()
    publish(node, 1, is_agreed=True)
    publish(node, 2)
    assert node.memory.newest.info.step == 1

    node.memory.keep_agreed(votes)

    assert [each.info.step for each in node.memory.slots.whole()] == kept
    assert node.memory.newest.info.step == kept[0]
    node.memory.keep_agreed([])  # the next generation died before its restore
    node.memory.keep_compared()  # another node may have another state of step 2
    assert [each.info.step for each in node.memory.slots.whole()] == [1]

    node.asks(2 * STATE_BYTES)
    for step in (3, 4):
        publish(node, step, is_agreed=True)
    node.memory.keep_agreed([])
    node.memory.keep_compared()
    assert node.memory.newest.info.step == 4
