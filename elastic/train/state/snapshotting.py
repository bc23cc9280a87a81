"""A snapshot is a state whole in a slot of shared memory, and counts once all ranks agreed on it.

Local rank 0 writes the node's snapshot, for all workers of the node (of a sharded state, all do:
sharded/snapshots.py). The memory is the agent's and
outlives the workers; without an agent it is this process's own. From host memory the copy completes
before the step's number is on the control page. From a GPU it overlaps the next step, and completes
before the number of that one is there. It does not make a state durable: the uploader makes
checkpoints of snapshots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from elastic.checkpoint.record import SAVE_S
from elastic.divergence import vote_of
from elastic.snapshot import image
from elastic.snapshot.copy_to_slot import SlotCopy
from elastic.snapshot.slots import Snapshot, SnapshotInfo, SnapshotSlots
from elastic.system.clock import Clock
from elastic.system.control_page import ControlPage
from elastic.train.state.flat import FlatState

# By how much a state may grow (a longer history in some state_dict) before it needs larger slots.
SLACK = 1.05
SLACK_BYTES = 1 << 20
PATIENCE_S = 30.0
FIRST_PATIENCE_S = 5.0
POLL_S = 0.002

# Slots that hold so many bytes each; None until there are. Raises SlotsRefused.
SlotsFor = Callable[[int], SnapshotSlots | None]


class SlotsRefused(Exception):  # noqa: N818
    """There is no memory for slots of this size; an agent looks again in the next generation."""


class AgentSlots:
    """The slots of this node's agent, which makes them when the control page asks for them."""

    def __init__(self, page: ControlPage, agent_pid: int) -> None:
        self._page = page
        self._agent_pid = agent_pid
        self._fd: int | None = None
        self._slots: SnapshotSlots | None = None

    def of_size(self, size_bytes: int) -> SnapshotSlots | None:
        fd = self._page.slots_fd
        if fd is not None and fd != self._fd:
            self._slots, self._fd = SnapshotSlots.open(f"/proc/{self._agent_pid}/fd/{fd}"), fd
        if self._slots is not None and self._slots.capacity_bytes >= size_bytes:
            return self._slots
        wanted = with_slack(size_bytes)
        if self._page.refused_bytes == wanted:
            raise SlotsRefused
        self._page.wanted_bytes = wanted
        return None


class OwnSlots:
    """One slot of this process's own, without an agent: for checkpoints alone, it dies with it."""

    _slots: SnapshotSlots | None = None

    def of_size(self, size_bytes: int) -> SnapshotSlots | None:
        if self._slots is None or self._slots.capacity_bytes < size_bytes:
            try:
                self._slots = SnapshotSlots.create(with_slack(size_bytes), 1)
            except OSError as error:
                raise SlotsRefused from error
        return self._slots


def with_slack(size_bytes: int) -> int:
    return int(size_bytes * SLACK) + SLACK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSnapshot:
    """A snapshot, the slots that it lies in, and the seconds of training that it cost."""

    slots: SnapshotSlots
    snapshot: Snapshot
    cost_s: float


def layout_of(state: FlatState, info: SnapshotInfo) -> image.Layout:
    """The image of a state that is the same on every rank. Raises StateNotSavable."""
    document = state.to_json() | {"step": info.step, "chain": info.chain, "data": info.data}
    return image.layout(state.tensors, document)


class Snapshotting:
    """The snapshots of one node in one generation."""

    def __init__(self, slots_for: SlotsFor, copy: SlotCopy, clock: Clock) -> None:
        self.copy = copy
        self._slots_for = slots_for
        self._clock = clock
        self._is_first = True
        # Publishes the copy that is under way; None where none is.
        self.under_way: Callable[[], PublishedSnapshot | None] | None = None
        self._newest: PublishedSnapshot | None = None
        self._agreed = (-1, 0)  # the last step that all ranks agree on, and their vote; none yet

    def take(
        self,
        state: FlatState,
        info: SnapshotInfo,
        *,
        wait: bool = True,
        patient: bool = False,
        before_publishing: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> PublishedSnapshot | None:
        """Copy this state into a slot, and publish it.

        info: what stands beside it; the checksum is filled in. wait: for a copy from a GPU;
        otherwise it stays under way, None is returned, and `finish` publishes it. patient: wait for
        a free slot for ten minutes, and half a minute for memory; the first one waits so for
        memory, and seconds for a slot. before_publishing: a place where a fault can be injected.
        meanwhile: called while it waits. Returns None as well when there is no memory, or no free
        slot.
        """
        assert self.under_way is None, "the one before is finished first"
        began_s = self._clock.monotonic()
        layout = layout_of(state, info)
        layout_s = self._clock.monotonic() - began_s
        if (found := self._free_slot(layout.size_bytes, patient=patient, meanwhile=meanwhile)) is None:
            return None
        slots, slot = found
        began_s = self._clock.monotonic()
        self.copy.start(layout, slots.body(slot))
        # Waiting for a free slot is no part of the cost: it does not come with every snapshot.
        cost_s = layout_s + self._clock.monotonic() - began_s
        if before_publishing is not None:
            before_publishing()
        self.under_way = partial(self._published, slots, slot, layout.size_bytes, info, cost_s)
        return self.finish() if wait or not self.copy.is_asynchronous else None

    def finish(self) -> PublishedSnapshot | None:
        """Wait for the copy that is under way, and publish it.

        None when none is under way.
        """
        if self.under_way is None:
            return None
        publish, self.under_way = self.under_way, None
        return publish()

    def _published(
        self, slots: SnapshotSlots, slot: int, size_bytes: int, info: SnapshotInfo, cost_s: float
    ) -> PublishedSnapshot:
        began_s = self._clock.monotonic()
        info = replace(info, checksum=self.copy.wait())
        snapshot = slots.publish(slot, size_bytes=size_bytes, info=info)
        cost_s += self._clock.monotonic() - began_s
        self._newest = PublishedSnapshot(slots=slots, snapshot=snapshot, cost_s=cost_s)
        self._mark_newest()
        return self._newest

    def agree(self, step: int, vote: int) -> None:
        """All ranks have voted so for the state after `step`: a snapshot of it counts from now on.

        A copy that is still on its way from a GPU counts once it is published.
        """
        self._agreed = step, vote
        self._mark_newest()

    def keeps(self, step: int, *, is_last: bool) -> bool:
        """Whether the state after `step` stays in memory.

        is_last: no step follows. In memory for one copy, another step's copy takes the place of it,
        and is torn until it is complete.
        """
        newest = self._newest
        if newest is None or newest.snapshot.info.step != step:
            return False
        is_there = newest.slots.is_whole(newest.snapshot.slot, newest.snapshot.seq)
        return is_there and (is_last or newest.slots.num_slots > 1)

    def discard_newer(self, step: int) -> None:
        """The ranks' states differ, and agreed last after `step`: what follows is void."""
        if self.under_way is not None:
            self.copy.wait()
            self.under_way = None
        if self._newest is not None:
            self._newest.slots.discard_newer(step)

    def _mark_newest(self) -> None:
        step, vote = self._agreed
        if self._newest is None or self._newest.snapshot.info.step != step:
            return
        slots, snapshot = self._newest.slots, self._newest.snapshot
        if vote_of(snapshot.info.checksum) == vote:
            slots.agree(snapshot.slot, snapshot.seq)
        else:
            print(f"the snapshot of step {step} is thrown away: the state changed while it was copied")
            slots.invalidate(snapshot.slot)

    def _free_slot(
        self, size_bytes: int, *, patient: bool, meanwhile: Callable[[], None]
    ) -> tuple[SnapshotSlots, int] | None:
        began_s, is_first, self._is_first = self._clock.monotonic(), self._is_first, False
        while True:
            try:
                slots = self._slots_for(size_bytes)
            except SlotsRefused:
                return None
            slot = None if slots is None else slots.begin()
            if slots is not None and slot is not None:
                return slots, slot
            # The agent makes memory in seconds, if it is gigabytes.
            is_patient = patient or (is_first and slots is None)
            limit_s = PATIENCE_S if is_patient else FIRST_PATIENCE_S if is_first else 0.0
            if patient and slots is not None:  # the only slot may be that of a save under way
                limit_s = SAVE_S
            meanwhile()
            if self._clock.monotonic() - began_s >= limit_s:
                return None
            self._clock.sleep(POLL_S)
